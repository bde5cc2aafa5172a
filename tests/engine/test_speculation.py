"""Whatever is drafted, the output is plain decoding's, token for token; pages always balance."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import LLM
from nanospec.attention.backend import HOST_PLANNED
from nanospec.attention.batch import slots_of
from nanospec.attention.torch_backend import TorchAttention
from nanospec.errors import ConfigError
from nanospec.params import SamplingRows
from nanospec.spec.dspark import DSparkSpeculator
from nanospec.spec.registry import SPECULATORS
from nanospec.spec.speculator import Speculator
from nanospec.types import Draft, PlanKind, Request, Resources, StepOutput
from tests import helpers
from tests.speculators import RandomDrafts, oracle

PROMPTS = [
    *helpers.random_prompts(4, seed=3),
    [*range(5, 15)] * 3,  # repeats itself, so that lookups find something
    helpers.random_prompts(1, seed=9)[0] * 2,
]


@pytest.fixture(scope="module")
def plain(qwen3: Path) -> dict[tuple[int, ...], list[int]]:
    """Plain greedy continuations of the prompts."""
    tokens = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(30))
    return {tuple(prompt): own for prompt, own in zip(PROMPTS, tokens, strict=True)}


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a speculator class known by the name `test`."""

    def known_as_test(kind: type[Speculator]) -> str:
        monkeypatch.setitem(SPECULATORS, "test", kind)
        return "test"

    yield known_as_test


def kinds(plain: dict[tuple[int, ...], list[int]], name: str) -> type[Speculator] | str:
    """Return a speculator by what it is like."""
    return {
        "random": RandomDrafts,
        "right": oracle(plain, tree=False),
        "right-tree": oracle(plain, tree=True),
        "adversarial": oracle(plain, wrong_at=range(0, 63), tree=False),
        "half": oracle(plain, wrong_at=range(3, 63, 4), tree=False),
    }.get(name, name)


ALL = ["random", "right", "right-tree", "adversarial", "half", "ngram", "trie", "draft"]
ALL += ["dspark", "dspark-tree"]
AHEAD = ["none-ahead", "dspark-ahead"]  # rounds are launched before the one before is settled
ALL += AHEAD
ALL += ["perturbed", "examples.lookahead:LookaheadSpeculator"]


def options_of(folder: Path, kind: Any, register: Any) -> dict[str, Any]:
    if isinstance(kind, str) and kind in AHEAD:
        own = options_of(folder, kind.removesuffix("-ahead"), register)
        return own | {"run_ahead": "on"}
    if kind == "perturbed":  # a drafter that is right now and then
        draft = folder.parent / "perturbed"
        if not draft.exists():
            helpers.perturbed(folder, draft, 0.12)
        return {"draft": str(draft)}
    if kind in ("dspark", "dspark-tree"):  # taught, or it would never be right
        draft = folder.parent / "dspark"
        if not draft.exists():
            taught = helpers.token_ids(helpers.make_llm(folder), PROMPTS[::2], helpers.greedy(30))
            shape = {"block_size": 16, "markov_rank": 64, "num_hidden_layers": 1}
            helpers.make_drafter(draft, folder, taught=taught, **shape)
        return {"draft": str(draft), "speculator": kind}
    name = kind if isinstance(kind, str) else register(kind)
    return {"speculator": name} | ({"draft": str(folder)} if name == "draft" else {})


EVERY_PAGE_SIZE = ("right-tree", "dspark-ahead")  # in the suite; slow: all


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        pytest.param(
            name,
            size,
            marks=[] if size == 3 or name in EVERY_PAGE_SIZE else [pytest.mark.slow],
        )
        for name in ALL
        for size in (1, 3, 16)
    ],
)
def test_greedy_output_is_that_of_plain_decoding(
    qwen3: Path, plain: Any, register: Any, name: str, page_size: int
) -> None:
    options = options_of(qwen3, kinds(plain, name), register)
    llm = helpers.make_llm(qwen3, page_size=page_size, max_draft_len=6, **options)
    for _ in range(2):  # the second time with a warm prefix cache
        assert helpers.token_ids(llm, PROMPTS, helpers.greedy(30)) == list(plain.values())
    for prompt, own in plain.items():
        assert helpers.token_ids(llm, [list(prompt)], helpers.greedy(30)) == [own]
    assert llm.engine.pages.num_free == llm.engine.pages.num_pages


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_is_under_preemption_too(
    qwen3: Path, plain: Any, register: Any, name: str, prefix_caching: bool
) -> None:
    options = options_of(qwen3, kinds(plain, name), register)
    llm = helpers.make_llm(
        qwen3,
        page_size=3,
        num_pages=34,
        max_model_len=100,
        max_num_batched_tokens=24,
        max_num_seqs=5,
        prefix_caching=prefix_caching,
        **options,
    )
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(30)) == list(plain.values())
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.pages.num_free == llm.engine.pages.num_pages


# Other engines: vllm 41190 and PR 48245 (preemption with drafts in flight), vllm PR 16370 (slots
# of drafts beyond the last page), sglang PR 33872 (drafts beyond a fixed number were corrupted).
@pytest.mark.parametrize(
    "name",
    ["random", "half", "right-tree", "draft", "perturbed", "trie", "dspark", "dspark-tree", *AHEAD],
)
@pytest.mark.parametrize("max_draft_len", [pytest.param(1, marks=pytest.mark.slow), 5, 16])
def test_aborts_and_preemptions_between_any_two_steps_change_nobody_else(
    qwen3: Path, plain: Any, register: Any, name: str, max_draft_len: int
) -> None:
    options = options_of(qwen3, kinds(plain, name), register)
    engine = helpers.make_llm(
        qwen3, page_size=3, max_num_seqs=4, max_draft_len=max_draft_len, **options
    ).engine
    rng = random.Random(max_draft_len)
    live = [engine.add(prompt, helpers.greedy(30)) for prompt in PROMPTS * 2]
    done = list(live)
    while engine.has_work:
        engine.step()
        running = engine.scheduler.running
        if running and rng.random() < 0.3 and not running[-1].in_flight:
            engine.scheduler._preempt(running[-1])
        if rng.random() < 0.1:
            engine.abort(rng.choice(live))
        for request in running:
            assert request.kv_len < len(request.tokens)
            assert len(set(request.pages)) == len(request.pages)
            assert request.stats.emitted <= request.num_output
    assert engine.pages.num_free == engine.pages.num_pages
    for request in done:
        want = plain[tuple(request.prompt_token_ids)]
        assert request.output_token_ids == want[: request.num_output]
        assert request.finish_reason == "abort" or request.num_output == len(want)


def test_an_oracle_is_accepted_whole_and_an_adversary_never(
    qwen3: Path, plain: Any, register: Any
) -> None:
    for name, length in (("right", 7.0), ("adversarial", 1.0)):
        options = options_of(qwen3, kinds(plain, name), register)
        llm = helpers.make_llm(qwen3, max_draft_len=6, **options)
        (output,) = llm.generate(PROMPTS[0], helpers.greedy(29))
        stats = output.stats
        assert stats.acceptance_length == length and stats.emitted == 28
        assert stats.drafted == stats.verified > 0
        assert stats.acceptance_rates == [float(name == "right")] * 6


# Other engines: llama.cpp 27117 (draft state shared between slots).
def test_a_drafter_equal_to_the_target_is_always_right_alone_and_in_a_batch(qwen3: Path) -> None:
    llm = helpers.make_llm(qwen3, draft=str(qwen3), max_draft_len=4)
    outputs = llm.generate(PROMPTS, helpers.greedy(26))
    assert [output.stats.acceptance_length for output in outputs] == [5.0] * len(PROMPTS)


# Other engines: vllm 47930, sglang PR 19897 (no drafter context after a prefix hit: acceptance 1).
def test_a_warm_prefix_cache_brings_the_drafters_context_along(qwen3: Path, llama: Path) -> None:
    llm = helpers.make_llm(qwen3, draft=str(qwen3), max_draft_len=4, page_size=3)
    prompt = PROMPTS[4]
    cold = llm.generate(prompt, helpers.greedy(26))[0].stats
    warm = llm.generate(prompt, helpers.greedy(26))[0].stats
    assert cold.acceptance_length == warm.acceptance_length == 5.0
    request = llm.engine.add(prompt, helpers.greedy(26))
    for _ in range(3):
        llm.engine.step()
    llm.engine.scheduler._preempt(request)
    while not request.is_finished:
        llm.engine.step()
    assert request.stats.rounds <= 7


# Other engines: vllm 51771 (speculation must not lose prefix hits).
def test_speculation_finds_the_prefixes_that_plain_decoding_finds(qwen3: Path) -> None:
    hits = []
    for options in ({}, {"speculator": "ngram"}, {"draft": str(qwen3)}):
        llm = helpers.make_llm(qwen3, page_size=3, **options)
        llm.generate(PROMPTS[4], helpers.greedy(8))
        hits.append(len(llm.engine.pages.match(PROMPTS[4])[0]))
    assert hits[0] == hits[1] == hits[2] > 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    "name",
    ["random", "ngram", "trie", "draft", "perturbed", "dspark", "dspark-tree", *AHEAD, ALL[-1]],
)
def test_with_shared_noise_sampled_output_is_plain_decodings_token_for_token(
    qwen3: Path, plain: Any, register: Any, name: str, temperature: float
) -> None:
    params = [
        helpers.greedy(20, temperature=temperature, seed=index, top_p=0.95)
        for index in range(len(PROMPTS))
    ]
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    options = options_of(qwen3, kinds(plain, name), register)
    llm = helpers.make_llm(qwen3, acceptance="shared-noise", page_size=3, **options)
    outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == want
    if name == "draft":  # the target itself: it draws what the target draws
        assert all(output.stats.acceptance_length > 4.5 for output in outputs)


@pytest.mark.parametrize("name", ["perturbed", "dspark", "dspark-tree", "dspark-ahead"])
def test_imperfect_drafters_are_right_now_and_then(qwen3: Path, register: Any, name: str) -> None:
    llm = helpers.make_llm(qwen3, **options_of(qwen3, name, register))
    llm.generate(PROMPTS, helpers.greedy(30))
    assert 0.1 < llm.stats.acceptance_rates[0] < 0.9


# Found in review: drafts that brought q along were judged by it although noise was to be shared.
def test_noise_is_shared_whatever_a_draft_records(qwen3: Path, register: Any) -> None:
    class Recording(Speculator):
        def propose(self, requests: Any) -> Any:
            uniform = torch.full((1, 320), 1 / 320)
            return [
                Draft([7] * r.max_drafts, probs=uniform.expand(r.max_drafts, -1)) for r in requests
            ]

    params = [helpers.greedy(15, temperature=1.0, seed=index) for index in range(len(PROMPTS))]
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    options = {"speculator": register(Recording), "acceptance": "shared-noise"}
    assert helpers.token_ids(helpers.make_llm(qwen3, **options), PROMPTS, params) == want


# Found in review: whoever had ended stayed, with its pages, when an observer raised.
def test_an_observer_that_raises_leaves_nothing_behind(
    qwen3: Path, plain: Any, register: Any
) -> None:
    llm = helpers.make_llm(qwen3, **options_of(qwen3, kinds(plain, "right"), register))

    def raising(step: Any) -> None:
        if any(step.reasons):
            raise OSError("disk full")

    llm.engine.observers.append(raising)
    with pytest.raises(OSError, match="disk full"):
        llm.generate(PROMPTS, helpers.greedy(10))
    assert not llm.engine.has_work and llm.engine.pages.num_free == llm.engine.pages.num_pages
    llm.engine.observers.clear()
    outputs = llm.generate(PROMPTS, helpers.greedy(10))
    assert [o.outputs[0].token_ids for o in outputs] == [own[:10] for own in plain.values()]


# Found in review: drafts took the rows that a new prompt needed.
def test_a_new_prompt_comes_before_drafts(qwen3: Path, plain: Any, register: Any) -> None:
    late_prompt = PROMPTS[4][:18]
    known = plain | {tuple(late_prompt): [5] * 9}
    options = options_of(qwen3, oracle(known, wrong_at=range(63), tree=False), register)
    steps = []
    for own in ({}, options):
        engine = helpers.make_llm(qwen3, max_num_batched_tokens=16, max_num_seqs=4, **own).engine
        for prompt in PROMPTS[:2]:
            engine.add(prompt, helpers.greedy(30))
        for _ in range(6):
            engine.step()
        late = engine.add(late_prompt, helpers.greedy(1))
        count = 0
        while not late.is_finished:
            engine.step()
            count += 1
        steps.append(count)
    assert steps[0] == steps[1] == 2


# Found against vLLM: with many requests their drafts lost their rows to whatever prompt came.
@pytest.mark.parametrize("max_num_batched_tokens", [None, 24])
def test_by_default_a_prompt_takes_no_rows_of_drafts(
    qwen3: Path,
    plain: Any,
    register: Any,
    monkeypatch: pytest.MonkeyPatch,
    max_num_batched_tokens: int | None,
) -> None:
    monkeypatch.setattr("nanospec.config.PROMPT_ROWS", 18)
    monkeypatch.setattr("nanospec.engine.scheduler.PROMPT_ROWS", 18)
    late_prompt = PROMPTS[4][:26]
    known = plain | {tuple(late_prompt): [5] * 9}
    options = options_of(qwen3, oracle(known, wrong_at=range(63), tree=False), register)
    options |= {"max_num_seqs": 3, "max_num_batched_tokens": max_num_batched_tokens}
    engine = helpers.make_llm(qwen3, **options).engine
    rows: list[int] = []
    engine.observers.append(lambda step: rows.append(step.num_tokens))
    for prompt in PROMPTS[:2]:
        engine.add(prompt, helpers.greedy(30))
    for _ in range(6):
        engine.step()
    engine.add(late_prompt, helpers.greedy(1))
    engine.step()
    assert rows[-1] == (2 * 8 + 26 if max_num_batched_tokens is None else 24)


def test_a_forward_has_rows_for_what_was_agreed_on(
    qwen3: Path, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(qwen3, RandomDrafts, register) | {"max_num_seqs": 3, "max_draft_len": 7}
    asked = helpers.make_llm(qwen3, **options).engine.scheduler.max_num_batched_tokens
    monkeypatch.setattr(
        TorchAttention, "capability", lambda self, layer: replace(HOST_PLANNED, max_rows=4)
    )
    agreed = helpers.make_llm(qwen3, **options).engine.scheduler.max_num_batched_tokens
    assert (asked, agreed) == (3 * 8 + 2048, 3 * 4 + 2048)


# Found in review: one tree put every request of the batch on the masked kernel.
def test_requests_without_a_tree_stay_on_the_causal_kernel(
    qwen3: Path, plain: Any, register: Any
) -> None:
    class OneTree(Speculator):
        def resources(self) -> Resources:
            return Resources(PlanKind.TREE, 8)

        def propose(self, requests: Any) -> Any:
            return [
                Draft([5, 6, 7], [0, 0, 1]) if request.request_id == 0 else Draft([5, 6])
                for request in requests
            ]

    llm = helpers.make_llm(qwen3, speculator=register(OneTree))
    masked = set()
    llm.engine.observers.append(lambda step: masked.add((step.plan.kind, step.plan.num_masked)))
    got = helpers.token_ids(llm, PROMPTS, helpers.greedy(30))
    assert got == list(plain.values())
    assert masked == {(PlanKind.CHAIN, 0), (PlanKind.TREE, 1)}


def test_unseeded_requests_are_judged_by_rejection_and_seeded_ones_share_noise(
    qwen3: Path, llama: Path
) -> None:
    engine = helpers.make_llm(qwen3, draft=str(qwen3)).engine
    sampled = helpers.greedy(5, temperature=1.0)
    assert not engine.add([5], sampled).shares_noise
    assert engine.add([5], helpers.greedy(5, temperature=1.0, seed=1)).shares_noise
    assert engine.add([5], helpers.greedy(5)).shares_noise
    engine = helpers.make_llm(qwen3, draft=str(qwen3), acceptance="rejection").engine
    assert not engine.add([5], helpers.greedy(5, temperature=1.0, seed=1)).shares_noise


# Other engines: vllm PR 10198 and 42802 (parameters that speculation forgot).
def test_rejection_with_a_drafter_that_is_the_target_accepts_all_with_any_filter(
    qwen3: Path,
) -> None:
    llm = helpers.make_llm(qwen3, draft=str(qwen3), acceptance="rejection", max_draft_len=4)
    for filters in ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.3}):
        params = helpers.greedy(26, **({"temperature": 1.0} | filters))
        for output in llm.generate(PROMPTS, params):
            assert output.stats.acceptance_length > 4.5


# Other engines: vllm 7047 (every proposal empty), ds4 913 (another sampler without drafts).
def test_without_drafts_a_speculating_engine_is_the_plain_one(qwen3: Path, register: Any) -> None:
    class Silent(Speculator):
        def propose(self, requests: Any) -> Any:
            return [None] * len(requests)

    params = helpers.greedy(12, temperature=1.0, seed=3)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    for acceptance in ("rejection", "shared-noise"):
        options = {"speculator": register(Silent), "acceptance": acceptance}
        assert helpers.token_ids(helpers.make_llm(qwen3, **options), PROMPTS, params) == want


def test_a_request_may_opt_out_inside_a_speculating_batch(
    qwen3: Path, plain: Any, register: Any
) -> None:
    llm = helpers.make_llm(qwen3, **options_of(qwen3, kinds(plain, "right"), register))
    params = [helpers.greedy(30, speculate=index % 2 == 0) for index in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == list(plain.values())
    for index, output in enumerate(outputs):
        assert (output.stats.drafted > 0) == (index % 2 == 0)


# Other engines: koboldcpp 1276, vllm PR 41493, sglang 31599 and 39826 (stops inside a block).
@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_inside_an_accepted_block_is_exact(
    qwen3: Path, plain: Any, register: Any, at: int
) -> None:
    llm = helpers.make_llm(
        qwen3, max_draft_len=6, **options_of(qwen3, kinds(plain, "right"), register)
    )
    free = plain[tuple(PROMPTS[0])]
    first = free.index(free[at])
    output = llm.generate(PROMPTS[0], helpers.greedy(30, stop_token_ids=[free[at]]))[0]
    completion, stats = output.outputs[0], output.stats
    assert completion.token_ids == free[: first + 1] and completion.finish_reason == "stop"
    assert stats.tokens == first + 1 and stats.emitted == first
    assert stats.accepted <= stats.emitted and sum(stats.kept) == stats.accepted
    assert all(kept <= offered for kept, offered in zip(stats.kept, stats.offered, strict=True))
    output = llm.generate(PROMPTS[0], helpers.greedy(at))[0]
    assert output.outputs[0].token_ids == free[:at]
    assert output.outputs[0].finish_reason == "length" and output.stats.tokens == at
    text = llm.tokenizer.decode(free[at : at + 1]) if llm.tokenizer else ""
    if text.strip():
        output = llm.generate(PROMPTS[0], helpers.greedy(30, stop=text))[0]
        alone = helpers.make_llm(qwen3).generate(PROMPTS[0], helpers.greedy(30, stop=text))[0]
        assert output.outputs == alone.outputs and output.stats.tokens == alone.stats.tokens


@pytest.mark.parametrize("name", AHEAD)
def test_a_stop_that_is_seen_a_round_late_shows_nowhere(
    qwen3: Path, plain: Any, register: Any, name: str
) -> None:
    options = options_of(qwen3, name, register) | {"max_draft_len": 6, "page_size": 3}
    on, off = (
        helpers.make_llm(qwen3, **(options | {"run_ahead": choice})) for choice in ("on", "off")
    )
    own = list(plain.values())
    stops = [{"stop_token_ids": [tokens[3 + 2 * at]]} for at, tokens in enumerate(own)]
    text = off.tokenizer.decode(own[0][5:7]) if off.tokenizer else ""
    stops[0] = {"stop": text} if text.strip() else stops[0]
    params = [helpers.greedy(30, **each) for each in stops]
    params[-1] = helpers.greedy(7)  # by length
    seen: list[StepOutput] = []
    on.engine.observers.append(seen.append)
    for got, want in zip(on.generate(PROMPTS, params), off.generate(PROMPTS, params), strict=True):
        assert got.outputs == want.outputs
        for figure in ("rounds", "drafted", "verified", "accepted", "emitted", "offered", "kept"):
            assert getattr(got.stats, figure) == getattr(want.stats, figure)
    assert on.engine.step_stats.budget == off.engine.step_stats.budget
    assert not on.engine.has_work
    assert any(not own for step in seen for own in step.emitted), "no stop was seen late"
    assert on.engine.pages.num_free == on.engine.pages.num_pages
    for got, want in zip(on.generate(PROMPTS, params), off.generate(PROMPTS, params), strict=True):
        assert got.outputs == want.outputs  # with whatever prefixes are cached now


def test_what_drafts_on_the_host_cannot_run_ahead(qwen3: Path, register: Any) -> None:
    class Silent(DSparkSpeculator):
        def propose(self, requests: Any) -> Any:
            return [None] * len(requests)

    for options in ({"speculator": "ngram"}, {"speculator": register(Silent)}):
        own = options_of(qwen3, "dspark-ahead", register) | options
        if options["speculator"] == "ngram":
            own["draft"] = None
        with pytest.raises(ConfigError, match="run_ahead=auto"):
            helpers.make_llm(qwen3, **own)
        llm = helpers.make_llm(qwen3, **(own | {"run_ahead": "auto"}))
        assert not llm.engine._ctx.runs_ahead


@pytest.mark.parametrize("name", AHEAD)
def test_rows_know_their_output_positions_ahead_of_the_host(
    qwen3: Path, register: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rows of a round go on from those of the round before, unless its requests are others."""
    llm = helpers.make_llm(qwen3, **options_of(qwen3, name, register))
    rows: list[SamplingRows] = []
    steps: list[tuple[list[Request], list[int], list[bool]]] = []

    def accept(*args: Any) -> None:
        rows.append(args[2])

    def observe(step: StepOutput) -> None:
        at = [
            start + 1 - len(request.prompt_token_ids)
            for request, start in zip(step.requests, step.starts, strict=True)
        ]
        steps.append((step.requests, at, [bool(own) for own in step.emitted]))

    monkeypatch.setattr(llm.engine.speculator, "accept", accept)
    llm.engine.observers.append(observe)
    limits = {"min_tokens": 4, "stop_token_ids": [300]}
    params = [helpers.greedy(12 + 5 * at, seed=at, **limits) for at in range(len(PROMPTS))]
    running = [llm.engine.add(*own) for own in zip(PROMPTS[1:], params[1:], strict=True)]
    while llm.engine.has_work:
        if len(steps) == 9:  # one leaves, another comes: as many as before
            llm.engine.abort(running[-1])
            llm.engine.add(PROMPTS[0], params[0])
        llm.engine.step()
    assert len(rows) == len(steps) > 20
    for own, (requests, positions, is_live) in zip(rows, steps, strict=True):
        assert own.seed.tolist() == [request.seed for request in requests]
        known = zip(own.position.tolist(), positions, is_live, strict=True)
        assert all(got == want for got, want, live in known if live)
    same = [own for own, step in zip(rows, steps, strict=True) if step[0] == steps[0][0]]
    assert not same[0].is_argmax and same[-1].is_argmax, "nobody is limited for ever"


# Found in review: what raised while drafting lost the round, and the engine never finished.
def test_an_error_while_drafting_ahead_loses_nothing(
    qwen3: Path, plain: Any, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = helpers.make_llm(qwen3, **options_of(qwen3, "dspark-ahead", register)).engine
    requests = [engine.add(prompt, helpers.greedy(30)) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()

    def raising(*_: Any) -> Any:
        raise OSError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine.speculator, "propose_ahead", raising)
        with pytest.raises(OSError, match="luck"):
            engine.step()
    while engine.has_work:
        engine.step()
    assert [request.output_token_ids for request in requests] == list(plain.values())
    assert engine.pages.num_free == engine.pages.num_pages


# Found in review: drafts of a later round overwrite what a plan's q is a view of.
@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_observers_see_the_q_of_their_own_round_or_none(
    qwen3: Path, register: Any, run_ahead: str
) -> None:
    options = options_of(qwen3, "dspark-ahead", register) | {"run_ahead": run_ahead}
    llm = helpers.make_llm(qwen3, acceptance="rejection", **options)
    seen: list[bool] = []

    def observe(step: StepOutput) -> None:
        drafts = [draft for draft in step.drafts if draft is not None]
        own = [draft.probs is not None for draft in drafts]
        origins = [draft.origin for draft in drafts if draft.origin is not None]
        own += [origin.probs is not None for origin in origins]
        seen.extend([*own, step.plan.probs is not None] if drafts else [])

    llm.engine.observers.append(observe)
    helpers.token_ids(llm, PROMPTS, helpers.greedy(20, temperature=0.9))
    assert set(seen) == {run_ahead == "off"}


def test_a_drafted_eos_that_is_rejected_ends_nothing(qwen3: Path, register: Any) -> None:
    class Eos(Speculator):
        def propose(self, requests: Any) -> Any:
            return [Draft([helpers.EOS] * request.max_drafts) for request in requests]

    llm = helpers.make_llm(qwen3, speculator=register(Eos))
    params = helpers.greedy(20, ignore_eos=False)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    assert helpers.token_ids(llm, PROMPTS, params) == want


def test_min_tokens_holds_inside_a_block(qwen3: Path, plain: Any, register: Any) -> None:
    free = plain[tuple(PROMPTS[0])]
    params = helpers.greedy(20, stop_token_ids=free[2:5], min_tokens=9)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    for name in ("right", "ngram"):
        options = options_of(qwen3, kinds(plain, name), register)
        llm = helpers.make_llm(qwen3, **options)
        assert helpers.token_ids(llm, PROMPTS, params) == want


# Other engines: lorax 474, TRT-LLM 16826 (drafts beyond the context, or counted into the limit).
def test_the_end_of_the_context_is_reached_exactly(qwen3: Path, register: Any) -> None:
    options = options_of(qwen3, RandomDrafts, register)
    llm = helpers.make_llm(qwen3, max_model_len=24, page_size=3, max_draft_len=16, **options)
    for length in (1, 10, 21, 22, 23):
        params = helpers.greedy(None)  # type: ignore[arg-type]
        output = llm.generate([5] * length, params)[0].outputs[0]
        assert len(output.token_ids) == 24 - length and output.finish_reason == "length"


# Other engines: vllm 57941 and PR 24662 (a drafter with a shorter context than the target).
def test_a_request_past_the_drafters_context_goes_on_without_drafts(
    qwen3: Path, tmp_path: Path
) -> None:
    short = helpers.make_checkpoint(tmp_path, "qwen3", max_position_embeddings=40)
    llm = helpers.make_llm(qwen3, draft=str(short), max_draft_len=4)
    prompts = [[5, 6, 7], [*range(5, 45)]]
    want = helpers.token_ids(helpers.make_llm(qwen3), prompts, helpers.greedy(60))
    outputs = llm.generate(prompts, helpers.greedy(60))
    assert [output.outputs[0].token_ids for output in outputs] == want
    assert outputs[0].stats.drafted > 0 and outputs[1].stats.drafted == 0


def test_drafts_give_their_pages_up_before_anybody_is_preempted(
    qwen3: Path, plain: Any, register: Any
) -> None:
    options = options_of(qwen3, kinds(plain, "adversarial"), register)
    lengths = sum(len(prompt) + 30 for prompt in PROMPTS[:2])
    llm = helpers.make_llm(
        qwen3, page_size=1, num_pages=lengths, max_model_len=lengths, max_draft_len=16, **options
    )
    tokens = helpers.token_ids(llm, PROMPTS[:2], helpers.greedy(30))
    assert tokens == list(plain.values())[:2]
    assert llm.engine.scheduler.num_preemptions == 0


def test_a_vocabulary_that_is_not_the_targets_is_refused(qwen3: Path, tmp_path: Path) -> None:
    other = helpers.make_checkpoint(tmp_path, "qwen3", vocab_size=helpers.VOCAB_SIZE + 1)
    with pytest.raises(ValueError, match="321 tokens, the target one of 320"):
        LLM(str(qwen3), draft=str(other), device="cpu")


# Other engines: sglang PR 33872 (right at 4 drafts, corrupted from 6 on).
@pytest.mark.parametrize("max_draft_len", range(1, 17))
def test_every_draft_length_copies_the_prompts_own_tokens(
    qwen3: Path, plain: Any, register: Any, max_draft_len: int
) -> None:
    for name in ("half", "right-tree"):
        options = options_of(qwen3, kinds(plain, name), register)
        llm = helpers.make_llm(qwen3, max_draft_len=max_draft_len, **options)
        assert helpers.token_ids(llm, PROMPTS, helpers.greedy(30)) == list(plain.values())


# Other engines: vllm 54011 (the last request alone, after a large batch, went wrong).
def test_a_batch_drains_to_its_last_request(qwen3: Path, plain: Any, register: Any) -> None:
    options = options_of(qwen3, kinds(plain, "half"), register)
    llm = helpers.make_llm(qwen3, **options)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(32)]
    params = [helpers.greedy(1 + index % 4 if index else 30) for index in range(32)]
    for prompt, own, got in zip(
        prompts, params, helpers.token_ids(llm, prompts, params), strict=True
    ):
        assert got == plain[tuple(prompt)][: own.max_tokens]


# Other engines: vllm PR 41768 (requests without drafts shifted the rows of later ones).
def test_min_tokens_masks_the_rows_of_its_own_request_alone(
    qwen3: Path, plain: Any, register: Any
) -> None:
    class Uneven(kinds(plain, "right")):  # type: ignore[misc]
        def propose(self, requests: Any) -> Any:
            drafts = super().propose(requests)
            sizes = {0: 0, 1: 3, 2: 0, 3: 2}
            for request in requests:
                request.max_drafts = min(request.max_drafts, sizes[request.request_id % 4])
            return drafts

    free = plain[tuple(PROMPTS[3])]
    own = [helpers.greedy(12) for _ in range(4)]
    own[3] = helpers.greedy(12, stop_token_ids=[free[2]], min_tokens=8)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS[:4], own)
    llm = helpers.make_llm(qwen3, speculator=register(Uneven))
    assert helpers.token_ids(llm, PROMPTS[:4], own) == want
    assert llm.stats.verified > 0


# Other engines: vllm PR 10198 (parameters were forgotten on the way to the target's law).
def test_top_k_of_one_is_greedy_with_drafts_of_any_kind(qwen3: Path, llama: Path) -> None:
    llm = helpers.make_llm(qwen3, draft=str(qwen3), acceptance="rejection")
    want = helpers.token_ids(llm, PROMPTS, helpers.greedy(12))
    params = helpers.greedy(12, temperature=1.0, top_k=1)
    assert helpers.token_ids(llm, PROMPTS, params) == want


def test_after_a_round_a_request_holds_pages_for_its_tokens_and_next_drafts_alone(
    qwen3: Path, plain: Any, register: Any
) -> None:
    options = options_of(qwen3, kinds(plain, "adversarial"), register)
    engine = helpers.make_llm(qwen3, page_size=1, max_draft_len=9, **options).engine
    requests = [engine.add(prompt, helpers.greedy(20)) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
        for request in requests:
            if request in engine.scheduler.running and request.num_output:
                tokens = len(request.tokens)
                assert tokens <= len(request.pages) or request.max_drafts == 0
                assert len(request.pages) <= tokens + request.max_drafts


@pytest.mark.parametrize("name", ["adversarial", "random", "right-tree", "draft"])
def test_the_prefix_cache_knows_committed_tokens_alone(
    qwen3: Path, plain: Any, register: Any, name: str
) -> None:
    options = options_of(qwen3, kinds(plain, name), register)
    llm = helpers.make_llm(qwen3, page_size=3, **options)
    llm.generate(PROMPTS, helpers.greedy(30))
    known = [[*prompt, *own] for prompt, own in plain.items()]
    pages = llm.engine.pages
    parents = {node: key for key, (_, node) in pages._page_of.items()}
    for key, (_, node) in pages._page_of.items():
        prefix: list[int] = []
        while node:
            parent, tokens = parents[node]
            prefix = [*tokens, *prefix]
            node = parent
        assert any(tokens[: len(prefix)] == prefix for tokens in known), key


# Other engines: speculators PR 574 (one table of angles for models of different theta).
def test_a_drafter_with_another_theta_has_angles_of_its_own(qwen3: Path, tmp_path: Path) -> None:
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    draft = helpers.make_checkpoint(tmp_path, "qwen3", **other)
    alone = helpers.token_ids(helpers.make_llm(draft), PROMPTS, helpers.greedy(1))
    llm = helpers.make_llm(qwen3, draft=str(draft), max_draft_len=1)
    drafted: dict[int, int] = {}

    def first_draft(step: Any) -> None:
        for request, draft in zip(step.requests, step.drafts, strict=True):
            if draft is not None and request.num_output - len(step.emitted[0]) == 1:
                drafted.setdefault(request.request_id, int(draft.tokens[0]))

    llm.engine.observers.append(first_draft)
    outputs = llm.generate([PROMPTS[0]], helpers.greedy(3))
    assert len(alone) == len(PROMPTS)
    context = PROMPTS[0] + outputs[0].outputs[0].token_ids[:1]
    want = helpers.token_ids(helpers.make_llm(draft), [context], helpers.greedy(1))[0]
    assert drafted[0] == want[0]


@pytest.mark.parametrize("name", ["right-tree", "half", "ngram"])
def test_features_of_all_rows_are_those_of_a_plain_forward(
    qwen3: Path, plain: Any, register: Any, name: str
) -> None:
    kind = kinds(plain, name)
    base = SPECULATORS[kind] if isinstance(kind, str) else kind
    seen: dict[int, Tensor] = {}  # by slot, as a drafter would keep what it makes of them

    class Tapping(base):  # type: ignore[misc, valid-type]
        def resources(self) -> Resources:
            return replace(super().resources(), taps=(0, 1))

        def observe_rows(self, batch: Any, features: Any) -> None:
            both = torch.cat(features, dim=1)
            seen.update(zip(batch.slots.tolist(), both, strict=True))

    llm = helpers.make_llm(
        qwen3, speculator=register(Tapping), max_num_batched_tokens=16, max_num_seqs=8
    )
    reference = helpers.load_reference(qwen3)
    checked = 0

    def compare(step: Any) -> None:
        nonlocal checked
        if step.plan.kind is not PlanKind.CHAIN:
            return  # accepted rows of a tree have moved to other slots since
        for rows in step.committed:
            with torch.inference_mode():
                tokens = torch.tensor([rows.request.tokens[: rows.end]])
                states = reference(tokens, output_hidden_states=True).hidden_states
            want = torch.cat((states[1][0], states[2][0]), dim=1)[rows.start :]
            size = llm.engine.pages.page_size
            slots = slots_of(rows.request.pages, range(rows.start, rows.end), size)
            got = torch.stack([seen[slot] for slot in slots])
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
            checked += len(slots)

    llm.engine.observers.append(compare)
    llm.generate(PROMPTS, helpers.greedy(20))
    assert checked > 40


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_on_a_gpu_speculation_gives_the_output_of_plain_decoding(
    qwen3: Path, plain: Any, register: Any, name: str
) -> None:
    """In float32 through the torch backend, with every Triton kernel; exact but for near-ties."""
    options = options_of(qwen3, kinds(plain, name), register)
    llm = helpers.make_llm(
        qwen3, device="cuda", attention="torch", kv_cache_gib=0.05, page_size=3, **options
    )
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(30)) == list(plain.values())
    params = [helpers.greedy(20, temperature=0.8, seed=index) for index in range(len(PROMPTS))]
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    assert helpers.token_ids(llm, PROMPTS, params) == want


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["none", "ngram", "trie", "draft", "dspark", "dspark-tree", ALL[-1]]
)
def test_flashinfer_serves_every_speculator(tmp_path: Path, name: str) -> None:
    folder = helpers.make_checkpoint(tmp_path / "target", "qwen3", head_dim=64)
    options = {"speculator": name} | ({"draft": str(folder)} if name == "draft" else {})
    if "dspark" in name:
        options["draft"] = str(helpers.make_drafter(tmp_path / "drafter", folder, head_dim=64))
    llm = LLM(str(folder), device="cuda", kv_cache_gib=0.1, max_model_len=256, **options)
    plain = LLM(str(folder), device="cuda", kv_cache_gib=0.1, max_model_len=256)
    got = helpers.token_ids(llm, PROMPTS, helpers.greedy(30))
    want = helpers.token_ids(plain, PROMPTS, helpers.greedy(30))
    reference = helpers.load_reference(folder)
    for prompt, left, right in zip(PROMPTS, got, want, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)
        if at is None:
            continue
        logits = helpers.reference_logits(reference, list(prompt) + right[:at])[-1]
        gap = abs(float(logits[left[at]] - logits[right[at]]))
        assert gap < 0.02 * float(logits.max() - logits.min()), "no near-tie"
    assert llm.engine.pages.num_free == llm.engine.pages.num_pages


@pytest.mark.gpu
@pytest.mark.parametrize("acceptance", ["rejection", "shared-noise"])
def test_a_drafter_equal_to_the_target_is_accepted_on_a_gpu(
    tmp_path: Path, acceptance: str
) -> None:
    folder = helpers.make_checkpoint(tmp_path, "qwen3", head_dim=64)
    options = {"draft": str(folder), "acceptance": acceptance, "max_draft_len": 4}
    llm = LLM(str(folder), device="cuda", kv_cache_gib=0.1, max_model_len=256, **options)
    outputs = llm.generate(PROMPTS, helpers.greedy(26, temperature=0.9, top_p=0.95))
    rounds = sum(output.stats.rounds for output in outputs)
    assert sum(output.stats.emitted for output in outputs) / rounds > 4.0
