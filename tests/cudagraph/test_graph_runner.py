"""Graphs replay what an eager run gives, whatever the batch, and write nowhere else."""

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import LLM
from nanospec.attention.batch import LONG_ROWS, ForwardBatch
from nanospec.config import EMBEDDED_PAIR, EngineConfig, ModelConfig
from nanospec.cudagraph.graph_runner import GraphRunner, Graphs, graph_bytes
from nanospec.cudagraph.runner import EagerRunner, TargetOutput
from nanospec.engine.sizing import graph_limits
from nanospec.types import PlanKind, Request, Resources, StepOutput
from tests import helpers

PROMPTS = [*helpers.random_prompts(11, seed=5), [*range(5, 15)] * 3]
KINDS = ["none", "ngram", "trie", "dspark", "dspark-tree", "dspark-adaptive", "lookahead"]


# Found against vLLM: with as many requests as may run, every round with a prompt beside them was
# beyond the largest graph, and was launched kernel by kernel.
def test_graphs_hold_short_prompts_beside_all_plans() -> None:
    assert EngineConfig(model="x", max_num_seqs=1).graph_rows(8) == 8 + 256
    config = EngineConfig(model="x", max_num_seqs=256)
    assert config.graph_rows(1) == 256 + 1024
    assert config.graph_rows(8) == 2048 + 1024
    few = EngineConfig(model="x", max_num_seqs=256, max_num_batched_tokens=2048)
    assert few.graph_rows(8) == 2048  # no forward has more
    assert EngineConfig(model="x", max_graph_rows=7).graph_rows(8) == 7


def test_limits_follow_from_what_plans_may_hold() -> None:
    config = EngineConfig(model="x", max_num_seqs=8, max_num_batched_tokens=100, page_size=4)
    limits = graph_limits(
        config, Resources(PlanKind.TREE, 5), takes_device_counts=True, max_model_len=30
    )
    assert (limits.rows, limits.logits, limits.segments, limits.has_words) == (100, 40, 16, True)
    assert limits.pages * 4 >= 30 + 3 * 5
    none = graph_limits(config, Resources(PlanKind.CHAIN, 5), takes_device_counts=False)
    assert (none.rows, none.full_rows) == (0, 0)


# Found against vLLM: prompts that queue up fill forwards beyond the largest tier, whose launch,
# kernel by kernel, took the host longer than a small model takes the GPU.
@pytest.mark.parametrize(
    ("options", "rows", "full_rows"),
    [
        ({"max_num_seqs": 256}, 3072, 4096),
        ({"max_num_seqs": 1}, 264, 2056),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 2048}, 2048, 0),  # as many as tiers hold
        ({"max_num_seqs": 256, "max_num_batched_tokens": 8192}, 3072, 0),  # the GPU takes longest
        ({"max_num_seqs": 256, "max_graph_rows": 100}, 100, 0),  # as the user wishes
    ],
)
def test_a_forward_that_prompts_fill_has_a_graph_too(
    options: dict[str, Any], rows: int, full_rows: int
) -> None:
    config = EngineConfig(model="x", **options)
    limits = graph_limits(config, Resources(PlanKind.CHAIN, 8), takes_device_counts=True)
    assert (limits.rows, limits.full_rows) == (rows, full_rows)
    model = ModelConfig.from_folder(EMBEDDED_PAIR / "target")
    kept = graph_bytes(limits, model, 2, 0)
    without = graph_bytes(dataclasses.replace(limits, full_rows=0), model, 2, 0)
    assert (kept > without) == (full_rows > 0)


@torch.inference_mode()
def test_only_a_full_forward_gets_the_graph_of_full_ones(qwen3: Path) -> None:
    llm = helpers.make_llm(qwen3, max_num_seqs=12, page_size=4)
    with_fake_graphs(llm, 32, 50)
    buffers = llm.engine._ctx.runner.buffers
    found = [(rows, buffers(rows, 4, 20)) for rows in (32, 33, 49, 50, 51)]
    assert [each is not None for _, each in found] == [True, False, False, True, False]
    lent = buffers(50, 12, 20)
    assert lent is not None and (lent.num_tokens, lent.max_rows) == (50, LONG_ROWS)
    assert buffers(50, 13, 20) is None  # more logits than there are graphs for


class FakeGraphs(Graphs):
    """Runs again what was captured: everything but CUDA is as with graphs."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], Callable[[], None]] = {}

    def capture(self, name: str, tiers: Sequence[int], run: Callable[[int], None]) -> None:
        """See `Graphs.capture`."""
        for tier in tiers:
            run(tier)
            self._runs[name, tier] = functools.partial(run, tier)

    def replay(self, name: str, tier: int) -> None:
        """See `Graphs.replay`."""
        self._runs[name, tier]()


@torch.inference_mode()
def with_fake_graphs(llm: LLM, rows: int, full_rows: int) -> None:
    """Let an engine on a CPU run as if it replayed graphs."""
    engine = llm.engine
    limits = graph_limits(
        EngineConfig(model="x", max_num_seqs=12, max_graph_rows=rows, page_size=4),
        engine.speculator.effective,
        takes_device_counts=True,
        max_model_len=engine.max_model_len,
    )
    limits = dataclasses.replace(limits, full_rows=full_rows)
    graphs, runner = FakeGraphs(), engine._ctx.runner
    assert isinstance(runner, EagerRunner)
    target, cache = runner._target, engine._ctx.caches[0]
    embedding = target.embed_tokens.weight  # type: ignore[attr-defined]
    replaying = GraphRunner(target, runner, graphs, limits, embedding, cache.scratch_slot)
    replaying.capture()
    engine.speculator.capture(graphs, limits)
    engine._ctx = dataclasses.replace(engine._ctx, runner=replaying)


@pytest.mark.parametrize(("rows", "full_rows"), [(4, 0), (48, 0), (32, 50)])
@pytest.mark.parametrize("kind", ["none", "none-ahead", "trie", "dspark", "dspark-ahead"])
def test_padding_and_buffers_change_no_output_and_no_live_page(
    qwen3: Path,
    tmp_path: Path,
    kind: str,
    rows: int,
    full_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 4 rows most batches are beyond the largest tier and run eagerly."""
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(20))
    options = options_of(kind.removesuffix("-ahead"), "tiny", qwen3, tmp_path)
    options |= {"run_ahead": "on" if "ahead" in kind else "off", "max_num_seqs": 12}
    options |= {"max_num_batched_tokens": full_rows} if full_rows else {}
    llm = helpers.make_llm(qwen3, page_size=4, **options)
    with_fake_graphs(llm, rows, full_rows)
    faults = watch_pages(llm, monkeypatch)
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(20)) == want
    stats = llm.engine.step_stats
    assert full_rows == 0 or stats.tiers[full_rows] > 0
    padding = stats.padding
    assert (padding > 0) == (rows > 4) or kind.startswith("none")
    params = [helpers.greedy(12, temperature=0.9, seed=i, top_p=0.9) for i in range(len(PROMPTS))]
    params[1] = helpers.greedy(12, stop_token_ids=[want[1][1]], min_tokens=5)
    again = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    assert helpers.token_ids(llm, PROMPTS, params) == again
    assert torch.stack(faults).sum(dim=0).tolist() == [0, 0]


def watch_pages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Watch what each forward from now on does to the caches, without waiting for it.

    What drafting and the moves of accepted rows write is no concern of a forward's.

    Returns:
        A list that grows by [2] int64 a forward, both of which should be 0: slots that changed
        though they are no real row's and not scratch; and rows whose slots are not where they
        belong, which is on live pages for real rows and behind them for all others.
    """
    runner, caches = llm.engine._ctx.runner, llm.engine._ctx.caches
    run, scratch = runner.run, caches[0].scratch_slot
    faults: list[Tensor] = []

    def watched(batch: ForwardBatch) -> TargetOutput:
        parts = [part for cache in caches for part in (cache.k, cache.v)]
        before = [part.clone() for part in parts]
        slots = batch.slots.clone()
        is_real = torch.arange(len(slots), device=slots.device) < batch.qo_indptr[-1]
        output = run(batch)
        may_change = torch.zeros(parts[0].shape[1], dtype=torch.bool, device=slots.device)
        may_change[scratch:] = True
        may_change.scatter_(0, torch.where(is_real, slots, scratch), True)
        has_changed = torch.zeros_like(may_change)
        for part, old in zip(parts, before, strict=True):
            has_changed |= (part != old).flatten(2).any(dim=2).any(dim=0)
        strays = has_changed & ~may_change
        faults.append(torch.stack((strays.sum(), (is_real != (slots < scratch)).sum())))
        return output

    monkeypatch.setattr(runner, "run", watched)
    return faults


def options_of(kind: str, model: str, folder: Path, tmp_path: Path) -> dict[str, Any]:
    if kind == "lookahead":
        return {"speculator": "examples.lookahead:LookaheadSpeculator"}
    if "dspark" not in kind:
        return {"speculator": kind}
    speculator = kind.removesuffix("-adaptive")
    adaptive = "schedule:[[1,99,3]]" if "adaptive" in kind else "off"
    if model == "pair":
        draft = EMBEDDED_PAIR / "drafter"
    else:
        taught = helpers.token_ids(helpers.make_llm(folder), PROMPTS[::2], helpers.greedy(40))
        draft = helpers.make_drafter(tmp_path / "drafter", folder, taught=taught, head_dim=16)
    return {"speculator": speculator, "draft": str(draft), "adaptive": adaptive}


def arrivals(llm: LLM, seed: int, rounds: int) -> list[tuple[list[int], list[int], str]]:
    """Run requests that come and go for so many rounds; return prompts, outputs and why they end.

    What comes depends on the seed and the round alone.
    """
    engine, rng = llm.engine, random.Random(seed)
    done: list[Request] = []
    aborted: set[int] = set()
    for _ in range(rounds):
        if rng.random() < 0.5 and len(engine.scheduler.waiting) < 9:
            temperature = rng.choice([0.0, 0.0, 0.8])
            params = helpers.greedy(rng.randint(1, 40), temperature=temperature, seed=len(done))
            done.append(engine.add(rng.choice(PROMPTS), params))
        if done and rng.random() < 0.03:
            aborted.add(rng.randrange(len(done)))
            engine.abort(done[max(aborted)])
        engine.step()
    while engine.has_work:
        engine.step()
    assert engine.pages.num_free == engine.pages.num_pages
    return [(r.prompt_token_ids, r.output_token_ids, str(r.finish_reason)) for r in done]


CASES = [("tiny", kind) for kind in KINDS]
CASES += [("pair", kind) for kind in ("none", "dspark", "dspark-tree", "dspark-adaptive")]
CASES += [("smollm2", kind) for kind in ("none", "ngram", "trie", "lookahead")]


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "kind"), CASES)
def test_graphs_give_what_eager_rounds_give(
    qwen3: Path, tmp_path: Path, request: pytest.FixtureRequest, model: str, kind: str
) -> None:
    """In float32, where these models have no near-ties."""
    folder = EMBEDDED_PAIR / "target" if model == "pair" else qwen3
    if model == "smollm2":
        folder = request.getfixturevalue("smollm2")
    options: dict[str, Any] = {"device": "cuda", "kv_cache_gib": 0.1, "max_num_seqs": 12}
    options |= options_of(kind, model, folder, tmp_path)
    options |= {"page_size": 4, "max_num_batched_tokens": 128}
    graphs = helpers.make_llm(folder, **options)
    tiers: set[int] = set()

    def observe(step: StepOutput) -> None:
        assert step.tier >= step.num_tokens
        tiers.add(step.tier)

    graphs.engine.observers.append(observe)
    found = arrivals(graphs, 1, 200)
    assert graphs.engine.step_stats.steps >= 200 and len(tiers) > 5
    eager = helpers.make_llm(folder, max_graph_rows=0, **options)
    reference = arrivals(eager, 1, 200)
    assert len(found) == len(reference)
    for (prompt, got, ended), (same, want, _) in zip(found, reference, strict=True):
        assert prompt == same
        shorter = min(len(got), len(want)) if ended == "abort" else len(want)
        assert got[:shorter] == want[:shorter] and (ended == "abort" or len(got) == len(want))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "trie", "dspark", "dspark-adaptive"])
def test_no_forward_on_a_gpu_changes_a_page_of_others(
    qwen3: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In so few pages that requests are preempted, and pages change hands."""
    options: dict[str, Any] = {"device": "cuda", "kv_cache_gib": 0.00016, "max_num_seqs": 12}
    options |= {"page_size": 4, "max_num_batched_tokens": 128, "max_model_len": 96}
    llm = helpers.make_llm(qwen3, **options, **options_of(kind, "tiny", qwen3, tmp_path))
    assert isinstance(llm.engine._ctx.runner, GraphRunner)
    faults = watch_pages(llm, monkeypatch)
    arrivals(llm, 2, 60)
    assert len(faults) > 60 and llm.engine.step_stats.padding > 0
    assert llm.engine.scheduler.num_preemptions > 0
    assert torch.stack(faults).sum(dim=0).tolist() == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "dspark"])
def test_forwards_that_prompts_fill_are_replayed_on_a_gpu(
    qwen3: Path, tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {"device": "cuda", "kv_cache_gib": 0.1, "max_num_seqs": 64}
    options |= options_of(kind, "tiny", qwen3, tmp_path)
    prompts = [prompt * (80 // len(prompt)) for prompt in helpers.random_prompts(150, seed=6)]
    llm = helpers.make_llm(qwen3, **options)
    full = llm.engine.scheduler.max_num_batched_tokens
    found = helpers.token_ids(llm, prompts, helpers.greedy(8))
    assert llm.engine.step_stats.tiers[full] > 0
    eager = helpers.make_llm(qwen3, max_graph_rows=0, **options)
    assert found == helpers.token_ids(eager, prompts, helpers.greedy(8))


@pytest.mark.gpu
def test_a_jump_from_the_smallest_tier_to_the_largest_and_back_is_clean(qwen3: Path) -> None:
    options = {"device": "cuda", "kv_cache_gib": 0.05, "max_num_seqs": 12}
    llm = helpers.make_llm(qwen3, **options)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(30))
    for _ in range(2):
        assert helpers.token_ids(llm, PROMPTS[:1], helpers.greedy(30)) == want[:1]
        assert helpers.token_ids(llm, PROMPTS, helpers.greedy(30)) == want
    assert {1, 12} <= set(llm.engine.step_stats.tiers)
