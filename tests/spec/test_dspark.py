"""DSpark through the whole engine: golden rounds, a dense re-implementation, caches, trees."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanospec import LLM
from nanospec.attention import torch_backend
from nanospec.attention.batch import slots_of
from nanospec.spec import noise
from nanospec.spec.sampler import draw, sampling_rows
from nanospec.types import Draft, PlanKind, Request, StepOutput
from tests import helpers
from tests.spec.dense_dspark import DenseDrafter

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "A"
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 2e-4}
PROMPTS = helpers.random_prompts(5, seed=21, longest=30)


@dataclass
class Block:
    """What one request was drafted in one round, and from what."""

    request: Request
    tokens: list[int]  # committed; the last one is the root
    max_drafts: int
    draft: Draft
    hidden: Tensor  # [n, H]
    logits: Tensor  # [n, V], corrected; of a tree [rows, V]
    confidence: Tensor | None  # [n]

    @property
    def start(self) -> int:
        """Position of the root."""
        return len(self.tokens) - 1

    @property
    def drafted(self) -> list[int]:
        """The draft's tokens."""
        return torch.as_tensor(self.draft.tokens).tolist()

    @property
    def before(self) -> list[int]:
        """The token before each of a chain's drafts."""
        return [self.tokens[-1], *self.drafted[:-1]]


@dataclass
class Recorder:
    """Listens to the drafter of an engine and to its rounds; changes nothing."""

    llm: LLM
    blocks: list[Block] = field(default_factory=list)
    steps: list[StepOutput] = field(default_factory=list)
    inputs: list[tuple[list[int], list[int]]] = field(default_factory=list)  # ids, positions
    contexts: list[list[int]] = field(default_factory=list)  # positions, rejected rows' too
    features: list[Tensor] = field(default_factory=list)  # of the same rows, [T, taps * H]

    def __post_init__(self) -> None:
        speculator: Any = self.llm.engine.speculator
        drafter = speculator._drafter
        hidden: list[Tensor] = []
        corrected: list[Tensor] = []
        confident: list[Tensor | None] = []
        base_logits, correct, propose = drafter.base_logits, drafter.correct, speculator.propose
        greedy_token, confidences = drafter.greedy_token, drafter.confidences
        forward, store_context = drafter.forward, drafter.store_context

        def recording_base_logits(rows: Tensor) -> Any:
            hidden.append(rows)
            return base_logits(rows)

        def recording_correct(*args: Any) -> Any:
            logits, state = correct(*args)
            corrected.append(logits)
            return logits, state

        def recording_greedy_token(*args: Any, out: Tensor) -> Any:
            count = len(corrected)
            state = greedy_token(*args, out=out)
            if len(corrected) == count:  # it did not need the logits
                recording_correct(*args)
            return state

        def recording_confidences(*args: Any) -> Any:
            confident.append(confidences(*args))
            return confident[-1]

        def recording_forward(token_ids: Tensor, positions: Tensor, attention: Any) -> Any:
            self.inputs.append((token_ids.tolist(), positions.tolist()))
            return forward(token_ids, positions, attention)

        def recording_context(features: Any, positions: Tensor, *where: Any) -> Any:
            self.contexts.append(positions.tolist())
            self.features.append(torch.cat(tuple(features), dim=1))
            return store_context(features, positions, *where)

        def recording_propose(requests: Sequence[Request]) -> Any:
            for record in (hidden, corrected, confident):
                record.clear()
            drafts = propose(requests)
            live = [pair for pair in zip(requests, drafts, strict=True) if pair[1] is not None]
            for index, (request, draft) in enumerate(live):
                count = len(draft) if draft.parents is None else len(corrected)
                found = confident[0] if confident else None  # of a tree there are none
                confidence = None if found is None else found[index, :count]
                self.blocks.append(
                    Block(
                        request,
                        list(request.tokens),
                        request.max_drafts,
                        draft,
                        hidden[0][index].clone(),
                        torch.stack([each[index] for each in corrected[:count]]),
                        confidence,
                    )
                )
            return drafts

        drafter.base_logits, drafter.correct = recording_base_logits, recording_correct
        drafter.greedy_token, drafter.confidences = recording_greedy_token, recording_confidences
        drafter.forward, drafter.store_context = recording_forward, recording_context
        speculator.propose = recording_propose
        self.llm.engine.observers.append(self.steps.append)

    def num_committed(self, number: int) -> int:
        """Return how many rows of a step lasted, of one request that drafts chains: the first."""
        return sum(rows.end - rows.start for rows in self.steps[number].committed)


def features_of(target: Any, taps: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return [S, T * H]: transformers' residual stream after the layers asked for."""
    with torch.inference_mode():
        states = target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap + 1][0] for tap in taps], dim=1)


@pytest.fixture(scope="module")
def golden_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter of the golden case, without the file of expected tensors."""
    folder = tmp_path_factory.mktemp("golden")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((GOLDEN / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """The golden tensors."""
    return load_file(GOLDEN / "golden.safetensors")


def golden_llm(golden_drafter: Path, **options: Any) -> LLM:
    return helpers.make_llm(GOLDEN / "target", draft=str(golden_drafter), **options)


@pytest.mark.parametrize("page_size", [1, 16])
def test_golden_rounds_are_reproduced_tensor_by_tensor(
    golden_drafter: Path, expected: dict[str, Tensor], page_size: int
) -> None:
    record = Recorder(golden_llm(golden_drafter, page_size=page_size))
    prompt = expected["prompt_ids"].tolist()
    (output,) = record.llm.generate(prompt, helpers.greedy(32))
    assert output.outputs[0].token_ids == expected["greedy_ids"].tolist()
    features = record.features[0]
    torch.testing.assert_close(features, expected["prompt_features"], **CLOSE)
    for number in range(3):
        block = record.blocks[number]

        def wanted(name: str, number: int = number) -> Tensor:
            return expected[f"round{number}.{name}"]

        ids, positions = record.inputs[number]
        assert ids == wanted("block_ids").tolist() and block.start == int(wanted("start"))
        assert positions == wanted("block_position_ids").tolist()
        lasting = record.num_committed(number)
        assert record.contexts[number][:lasting] + positions == wanted("position_ids").tolist()
        features = record.features[number][:lasting]
        torch.testing.assert_close(features, wanted("context_features"), **CLOSE)
        torch.testing.assert_close(block.hidden, wanted("hidden"), **CLOSE)
        base = record.llm.engine.speculator._drafter.base_logits(block.hidden)  # type: ignore[attr-defined]
        torch.testing.assert_close(base, wanted("base_logits"), **CLOSE)
        torch.testing.assert_close(block.logits, wanted("logits"), **CLOSE)
        torch.testing.assert_close(block.confidence, wanted("confidence_logits"), **CLOSE)
        assert block.drafted == wanted("draft_ids").tolist()
        step = record.steps[number + 1]
        torch.testing.assert_close(step.logits, wanted("verify_logits"), **CLOSE)
        assert step.plan.tokens[0].tolist() == wanted("verify_ids").tolist()
        assert len(step.path[0]) - 1 == int(wanted("accepted"))
        assert step.emitted[0][-1] == int(wanted("next_anchor"))


def test_golden_acceptance_of_the_whole_run(
    golden_drafter: Path, expected: dict[str, Tensor]
) -> None:
    record = Recorder(golden_llm(golden_drafter))
    record.llm.generate(expected["prompt_ids"].tolist(), helpers.greedy(32))
    accepted = [len(step.path[0]) - 1 for step in record.steps[1:]]
    want = expected["accepted_per_round"].tolist()
    assert accepted[:-1] == want[:-1]
    assert accepted[-1] == min(want[-1], len(record.blocks[-1].draft))  # cut by max_tokens


HEADS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "target_layer_ids": [-1, 1]},
    "rnn": {"markov_head_type": "RNN", "block_size": 5, "num_hidden_layers": 3},
    "dflash": {
        "markov_rank": 0,
        "markov_head_type": None,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
        "target_layer_ids": [1],
    },
    "confidence-alone": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "no-markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "one-slot": {"block_size": 1, "num_key_value_heads": 1},
}


@pytest.mark.parametrize(
    ("family", "head"), [*(("qwen3", head) for head in HEADS), ("llama", "vanilla")]
)
def test_every_block_of_a_ragged_batch_equals_the_dense_equations(
    tmp_path: Path, request: pytest.FixtureRequest, family: str, head: str
) -> None:
    folder = request.getfixturevalue(family)
    # Of every second prompt the Markov head knows the plain continuation, so that some is accepted.
    plain = helpers.token_ids(helpers.make_llm(folder), PROMPTS, helpers.greedy(12))
    taught = [] if "markov_rank" in HEADS[head] else plain[::2]
    draft = helpers.make_drafter(tmp_path, folder, taught=taught, **HEADS[head])
    dense = DenseDrafter.load(draft)
    size = dense.config["block_size"]
    llm = helpers.make_llm(
        folder,
        draft=str(draft),
        max_draft_len=size,
        page_size=3,
        max_num_batched_tokens=24,
        max_num_seqs=8,
    )
    record = Recorder(llm)
    params = [helpers.greedy(4 + 2 * index) for index in range(len(PROMPTS))]
    got = helpers.token_ids(llm, PROMPTS, params)
    assert got == [own[: each.max_tokens] for own, each in zip(plain, params, strict=True)]
    reference = helpers.load_reference(folder)
    lengths = set()
    for block in record.blocks:
        n = len(block.draft)
        lengths.add(n)
        assert n == min(block.max_drafts, size) and block.draft.parents is None
        features = features_of(reference, dense.config["target_layer_ids"], block.tokens[:-1])
        hidden = dense.block(block.tokens[-1], n, features)
        torch.testing.assert_close(block.hidden[:n].double(), hidden, **CLOSE)
        logits = dense.chain(hidden, block.before)
        torch.testing.assert_close(block.logits.double(), logits, **CLOSE)
        assert block.drafted == logits.argmax(dim=1).tolist()
        if dense.config["enable_confidence_head"]:
            assert block.confidence is not None
            confidence = dense.confidence(hidden, block.before)
            torch.testing.assert_close(block.confidence.double(), confidence, **CLOSE)
            survival = torch.as_tensor(block.draft.survival, dtype=torch.float64)
            torch.testing.assert_close(survival, confidence.sigmoid().cumprod(0), **CLOSE)
        else:
            assert block.confidence is None and block.draft.survival is None
    assert len(record.blocks) >= 12 and (len(lengths) > 2 or size == 1)


def check_context(llm: LLM, dense: DenseDrafter, target: Any) -> int:
    """Compare the drafter's cached context of all running requests; return how many rows."""
    engine: Any = llm.engine
    cache, rows = engine.speculator._cache, 0
    for request in engine.scheduler.running:
        if request.kv_len == 0:
            continue
        taps = dense.config["target_layer_ids"]
        want = dense.context(features_of(target, taps, request.tokens[: request.kv_len]))
        slots = slots_of(request.pages, range(request.kv_len), cache.page_size)
        for layer, (k, v) in enumerate(want):
            torch.testing.assert_close(cache.k[layer, slots].double(), k, **CLOSE)
            torch.testing.assert_close(cache.v[layer, slots].double(), v, **CLOSE)
        if request.num_output:
            assert request.kv_len == len(request.tokens) - 1
        rows += request.kv_len
    return rows


@pytest.mark.parametrize(
    ("speculator", "page_size"), [("dspark", 1), ("dspark", 16), ("dspark-tree", 3)]
)
def test_after_every_step_the_cached_context_is_what_a_recomputation_gives(
    golden_drafter: Path, speculator: str, page_size: int
) -> None:
    """Through chunks, shared prefixes, acceptance, rejection, preemption and what was cached."""
    llm = golden_llm(
        golden_drafter,
        speculator=speculator,
        page_size=page_size,
        max_num_batched_tokens=24,
        max_num_seqs=4,
    )
    dense, target = DenseDrafter.load(golden_drafter), helpers.load_reference(GOLDEN / "target")
    engine = llm.engine
    first = torch.randint(5, 120, (37,), generator=torch.Generator().manual_seed(5)).tolist()
    prompts = [first, first[:20], [*first[:33], 7, 8], [9, 10]]
    rows, steps = 0, 0
    for prompt in prompts + prompts[:1]:
        engine.add(prompt, helpers.greedy(14))
        for _ in range(2):
            engine.step()
            rows += check_context(llm, dense, target)
    while engine.has_work:
        engine.step()
        rows += check_context(llm, dense, target)
        steps += 1
        running = engine.scheduler.running
        if running and steps % 5 == 2:
            engine.scheduler._preempt(running[-1])
    assert rows > 1000 and llm.stats.accepted > 0


def history(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[dict[int, tuple[list[int], int]]]:
    """Return per prompt, by the root's position, what was drafted and how much was accepted."""
    found: dict[int, dict[int, tuple[list[int], int]]] = {}

    def observe(step: StepOutput) -> None:
        for request, draft, own, path in zip(
            step.requests, step.drafts, step.emitted, step.path, strict=True
        ):
            if draft is not None:
                root = len(request.tokens) - len(own) - 1
                tokens = torch.as_tensor(draft.tokens).tolist()
                found.setdefault(request.request_id, {})[root] = (tokens, len(path) - 1)

    llm.engine.observers.append(observe)
    llm.generate([list(prompt) for prompt in prompts], helpers.greedy(20))
    llm.engine.observers.remove(observe)
    return [found[key] for key in sorted(found)]


SHARING = [[*range(20, 51)], [*range(20, 44), 9, 8], [*range(20, 51), 4, 5, 6], [3] * 9]


@pytest.mark.parametrize(("speculator", "page_size"), [("dspark", 1), ("dspark-tree", 4)])
def test_a_warm_prefix_cache_changes_no_draft_and_no_acceptance(
    golden_drafter: Path, speculator: str, page_size: int
) -> None:
    options = {"speculator": speculator, "page_size": page_size}
    cold = [
        history(golden_llm(golden_drafter, prefix_caching=False, **options), [prompt])[0]
        for prompt in SHARING
    ]
    assert sum(accepted for own in cold for _, accepted in own.values()) > 0
    llm = golden_llm(golden_drafter, **options)
    one_by_one = [history(llm, [prompt])[0] for prompt in SHARING]  # shared prefixes hit
    together = history(llm, SHARING)  # all of it hits
    record = Recorder(llm)
    again = history(llm, SHARING)
    assert one_by_one == together == again == cold
    assert len(record.contexts[0]) <= page_size * len(SHARING), "the prompts were not cached"


def test_small_chunks_of_the_prompt_change_no_draft_and_no_acceptance(
    golden_drafter: Path,
) -> None:
    whole = history(golden_llm(golden_drafter), SHARING)
    llm = golden_llm(golden_drafter, max_num_batched_tokens=9, max_num_seqs=1, page_size=3)
    assert history(llm, SHARING) == whole


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_a_preemption_drafts_and_acceptance_are_those_of_an_undisturbed_run(
    golden_drafter: Path, prefix_caching: bool
) -> None:
    want = history(golden_llm(golden_drafter), SHARING)
    llm = golden_llm(golden_drafter, page_size=4, prefix_caching=prefix_caching)
    record = Recorder(llm)
    requests = [llm.engine.add(prompt, helpers.greedy(20)) for prompt in SHARING]
    for count in itertools.count():
        if not llm.engine.has_work:
            break
        llm.engine.step()
        if count in (2, 4) and llm.engine.scheduler.running:
            llm.engine.scheduler._preempt(llm.engine.scheduler.running[0])
    assert llm.engine.scheduler.num_preemptions == 2
    common = 0
    for block in record.blocks:
        known = want[requests.index(block.request)]
        if block.start in known:
            common += 1
            assert block.drafted == known[block.start][0]
    assert common >= len(record.blocks) // 2


@pytest.mark.parametrize("max_draft_len", [1, 3])
def test_shorter_blocks_than_the_drafters_own_work(
    golden_drafter: Path, expected: dict[str, Tensor], max_draft_len: int
) -> None:
    record = Recorder(golden_llm(golden_drafter, max_draft_len=max_draft_len))
    got = helpers.token_ids(record.llm, [expected["prompt_ids"].tolist()], helpers.greedy(32))
    assert got == [expected["greedy_ids"].tolist()]
    assert max(len(block.draft) for block in record.blocks) == max_draft_len
    assert record.llm.stats.accepted > 0


def test_a_chain_longer_than_the_block_is_refused_with_both_numbers(golden_drafter: Path) -> None:
    with pytest.raises(ValueError, match=r"max_draft_len=8 .* block of 7"):
        golden_llm(golden_drafter, max_draft_len=8)


@pytest.mark.parametrize("speculator", ["dspark", "dspark-tree"])
def test_near_the_drafters_last_position_drafts_become_shorter_and_then_none(
    qwen3: Path, tmp_path: Path, speculator: str
) -> None:
    draft = helpers.make_drafter(tmp_path, qwen3, max_position_embeddings=24)
    llm = helpers.make_llm(qwen3, draft=str(draft), speculator=speculator)
    record = Recorder(llm)
    prompts = [[*range(5, 18)], [*range(5, 45)], [*range(5, 27)]]
    plain = helpers.token_ids(helpers.make_llm(qwen3), prompts, helpers.greedy(20))
    assert helpers.token_ids(llm, prompts, helpers.greedy(20)) == plain
    assert all(max(positions) < 24 for _, positions in record.inputs)
    assert {len(block.draft) for block in record.blocks if block.request.request_id == 0} >= {7, 1}
    assert all(block.request.request_id != 1 for block in record.blocks)


def test_a_request_that_opts_out_gets_no_draft_and_its_context_is_kept(
    golden_drafter: Path,
) -> None:
    llm = golden_llm(golden_drafter, page_size=4)
    dense, target = DenseDrafter.load(golden_drafter), helpers.load_reference(GOLDEN / "target")
    request = llm.engine.add(SHARING[0], helpers.greedy(9, speculate=False))
    while not request.is_finished:
        llm.engine.step()
        check_context(llm, dense, target)
    assert request.stats.drafted == 0
    assert history(llm, SHARING[:1]) == history(golden_llm(golden_drafter), SHARING[:1])


def test_calibration_scales_the_confidence_of_each_slot_by_regime(
    qwen3: Path, tmp_path: Path
) -> None:
    cold = [[0.5, 0.0], [1.0, 1.0], [2.0, -0.5], [3.0, 0.25]]
    warm = [[4.0, -1.0], [0.25, 0.0], [1.5, 0.5], [0.75, 0.0]]
    folder = helpers.make_drafter(tmp_path, qwen3, block_size=4)
    helpers.write_json(folder / "confidence.json", {"greedy": cold, "sampled": warm})
    record = Recorder(helpers.make_llm(qwen3, draft=str(folder), max_draft_len=4))
    params = [helpers.greedy(8, temperature=t) for t in (0.0, 1.0, 0.0)]
    record.llm.generate(PROMPTS[:3], params)
    for block in record.blocks:
        by = torch.tensor(cold if block.request.params.is_greedy else warm)[: len(block.draft)]
        assert block.confidence is not None
        want = (block.confidence / by[:, 0] + by[:, 1]).sigmoid().cumprod(dim=0)
        torch.testing.assert_close(torch.as_tensor(block.draft.survival), want, rtol=0, atol=1e-6)
    assert {block.request.params.is_greedy for block in record.blocks} == {True, False}


def six_tokens(tmp_path: Path, **overrides: Any) -> tuple[Path, Path]:
    """Return a target of six tokens and a drafter for it."""
    shape = {"vocab_size": 6, "initializer_range": 0.12}
    target = helpers.make_checkpoint(tmp_path / "target", "qwen3", **shape)
    return target, helpers.make_drafter(
        tmp_path / "draft", target, **({"block_size": 4} | overrides)
    )


@pytest.mark.parametrize(
    ("head", "dtype"), [("vanilla", "float32"), ("rnn", "bfloat16"), ("no-markov", "bfloat16")]
)
def test_the_recorded_q_is_what_the_drafts_were_drawn_from(
    tmp_path: Path, head: str, dtype: str
) -> None:
    target, draft = six_tokens(tmp_path, **(HEADS[head] | {"block_size": 4}))
    llm = helpers.make_llm(target, draft=str(draft), max_draft_len=4, dtype=dtype)
    record = Recorder(llm)
    each = [helpers.greedy(8, temperature=(0.6, 1.0, 1.7)[i % 3]) for i in range(30)]
    llm.generate([[2, 3, 5]] * 30, each)
    assert len(record.blocks) > 30
    for block in record.blocks:
        probs, temperature = block.draft.probs, block.request.params.temperature
        assert probs is not None and probs.dtype == torch.float32
        torch.testing.assert_close(probs.sum(dim=1), torch.ones(len(probs)), rtol=0, atol=1e-6)
        assert block.logits.dtype == torch.float32
        want = (block.logits.double() / temperature).softmax(dim=1)
        torch.testing.assert_close(probs.double(), want, rtol=0, atol=1e-6)
        root = sampling_rows([block.request], 6, torch.device("cpu"))
        root.position.fill_(len(block.tokens) - 3)
        drawn = [int(draw(q[None], root, noise.DRAFT + i)) for i, q in enumerate(probs)]
        assert block.drafted == drawn
        assert bool((probs.gather(1, torch.tensor(drawn)[:, None]) > 0).all())


def test_pairs_of_drafts_of_many_requests_follow_the_recorded_q(tmp_path: Path) -> None:
    target, draft = six_tokens(tmp_path, block_size=2)
    llm = helpers.make_llm(target, draft=str(draft), max_draft_len=2, max_num_seqs=1000)
    record = Recorder(llm)
    for _ in range(1000):
        llm.engine.add([2], helpers.greedy(4, temperature=2.0))
    llm.engine.step()
    assert len(record.blocks) == 1000
    roots = [block.tokens[-1] for block in record.blocks]
    common = max(range(6), key=roots.count)
    blocks = [each for each in record.blocks if each.tokens[-1] == common]
    assert len(blocks) > 200
    law = torch.zeros(6, 6, dtype=torch.float64)
    for block in blocks:
        assert block.draft.probs is not None
        q = block.draft.probs.double()
        law[block.drafted[0]] = q[0, block.drafted[0]] * q[1]  # the same in every such block
    pairs = torch.tensor([block.drafted for block in blocks]) @ torch.tensor([6, 1])
    counts, expected = pairs.bincount(minlength=36).double(), law.flatten() * len(blocks)
    large = expected >= 5
    statistic = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    assert int(large.sum()) >= 8 and statistic < 77.0  # 0.9999 with at most 35 degrees of freedom


# Trees.


def depths_of(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens from the root to each row."""
    paths: list[tuple[int, ...]] = [()]
    assert draft.parents is not None
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent], int(token)))
    return paths[1:]


@pytest.mark.parametrize(
    ("head", "temperature"),
    [("vanilla", 0.0), ("vanilla", 1.0), ("gated", 1.0), ("rnn", 0.0), ("rnn", 0.7), ("dflash", 1)],
)
def test_a_tree_is_the_set_of_the_most_probable_paths(
    tmp_path: Path, head: str, temperature: float
) -> None:
    overrides = HEADS[head] | {"block_size": 3, "num_hidden_layers": 2}
    target, draft = six_tokens(tmp_path, **overrides)
    llm = helpers.make_llm(target, draft=str(draft), speculator="dspark-tree", max_draft_len=20)
    record = Recorder(llm)
    prompts = [[2, 3, 5], [4] * 7, [5, 0, 2, 3, 4]]
    params = [helpers.greedy(n, temperature=temperature) for n in (26, 9, 14)]
    llm.generate(prompts, params)
    dense, reference = DenseDrafter.load(draft), helpers.load_reference(target)
    sizes = set()
    for block in record.blocks:
        own, survival = block.draft, block.draft.survival
        assert own.parents is not None and survival is not None and own.probs is None
        depth = min(block.max_drafts, 3)
        features = features_of(reference, dense.config["target_layer_ids"], block.tokens[:-1])
        hidden = dense.block(block.tokens[-1], depth, features)
        laws = dense.paths(hidden, block.tokens[-1], temperature or 1.0)
        law = {path: chance for each in laws for path, chance in each.items()}
        size = min(block.max_drafts, len(law))
        ranked = sorted(law, key=lambda path: -law[path])
        paths = paths_of(own)
        assert len(own) == size == len(set(paths)), "siblings differ"
        assert all(parent <= row for row, parent in enumerate(own.parents))
        assert max(depths_of(own.parents)) <= depth
        if size == len(law) or law[ranked[size - 1]] - law[ranked[size]] > 1e-5:
            assert set(paths) == set(ranked[:size])
        assert list(survival) == sorted(survival, reverse=True)
        want = torch.tensor([law[path] for path in paths])
        torch.testing.assert_close(torch.tensor(survival), want, rtol=1e-3, atol=1e-5)
        sizes.add(size)
    assert len(sizes) > 3 and max(sizes) == 20


def test_a_tree_takes_every_path_where_there_are_few(tmp_path: Path) -> None:
    target, draft = six_tokens(tmp_path, block_size=2)
    options = {"draft": str(draft), "speculator": "dspark-tree", "max_draft_len": 63}
    record = Recorder(helpers.make_llm(target, **options))
    got = helpers.token_ids(record.llm, [[2, 3, 5]], helpers.greedy(80))
    assert got == helpers.token_ids(helpers.make_llm(target), [[2, 3, 5]], helpers.greedy(80))
    assert len(record.blocks[0].draft) == 6 + 36
    assert sorted(depths_of(record.blocks[0].draft.parents or [])) == [1] * 6 + [2] * 36


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_a_tree_offers_no_token_that_the_filters_forbid(
    tmp_path: Path, filters: dict[str, Any]
) -> None:
    target, draft = six_tokens(tmp_path)
    options = {"draft": str(draft), "speculator": "dspark-tree", "max_draft_len": 16}
    record = Recorder(helpers.make_llm(target, **options))
    params = helpers.greedy(18, temperature=1.0, **filters)
    record.llm.generate([[2, 3, 5]], params)
    for block in record.blocks:
        assert block.draft.parents is not None and block.draft.survival is not None
        assert min(block.draft.survival) > 0
        if "top_k" in filters:
            assert max(block.draft.parents.count(row) for row in range(17)) <= 2
    assert record.llm.stats.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_where_attention_has_no_masks_a_tree_becomes_its_first_path(
    golden_drafter: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    chains = replace(torch_backend.HOST_PLANNED, kind=PlanKind.CHAIN)
    monkeypatch.setattr(torch_backend, "HOST_PLANNED", chains)
    params = helpers.greedy(24, temperature=temperature, seed=3)
    plain = helpers.token_ids(helpers.make_llm(GOLDEN / "target"), SHARING, params)
    llm = golden_llm(golden_drafter, speculator="dspark-tree", max_draft_len=12)
    kinds = set()
    llm.engine.observers.append(lambda step: kinds.add(step.plan.kind))
    assert helpers.token_ids(llm, SHARING, params) == plain
    assert kinds == {PlanKind.CHAIN} and llm.stats.accepted > 0
