"""Graphs replay what an eager run gives, whatever the batch, and write nowhere else."""

import random
from pathlib import Path
from typing import Any

import pytest

from nanospec import LLM
from nanospec.config import EngineConfig
from nanospec.engine.sizing import graph_limits
from nanospec.types import PlanKind, Request, Resources, StepOutput
from tests import helpers

PROMPTS = [*helpers.random_prompts(11, seed=5), [*range(5, 15)] * 3]
KINDS = ["none", "ngram", "trie", "dspark", "dspark-tree", "dspark-adaptive", "lookahead"]


def test_limits_follow_from_what_plans_may_hold() -> None:
    config = EngineConfig(model="x", max_num_seqs=8, max_num_batched_tokens=100, page_size=4)
    limits = graph_limits(
        config, Resources(PlanKind.TREE, 5), takes_device_counts=True, max_model_len=30
    )
    assert (limits.rows, limits.logits, limits.segments, limits.has_words) == (40, 40, 16, True)
    assert limits.pages * 4 >= 30 + 3 * 5
    none = graph_limits(config, Resources(PlanKind.CHAIN, 5), takes_device_counts=False)
    assert none.rows == 0


def options_of(kind: str, folder: Path, tmp_path: Path) -> dict[str, Any]:
    if kind == "lookahead":
        return {"speculator": "examples.lookahead:LookaheadSpeculator"}
    if "dspark" not in kind:
        return {"speculator": kind}
    taught = helpers.token_ids(helpers.make_llm(folder), PROMPTS[::2], helpers.greedy(40))
    draft = helpers.make_drafter(tmp_path / "drafter", folder, taught=taught, head_dim=16)
    speculator = kind.removesuffix("-adaptive")
    adaptive = "schedule:[[1,99,3]]" if "adaptive" in kind else "off"
    return {"speculator": speculator, "draft": str(draft), "adaptive": adaptive}


def arrivals(llm: LLM, seed: int, rounds: int) -> list[tuple[list[int], list[int]]]:
    """Run requests that come and go; return prompts and what was made of them."""
    engine, rng = llm.engine, random.Random(seed)
    live: list[Request] = []
    done: list[Request] = []
    while len(done) < rounds or engine.has_work:
        if len(done) < rounds and rng.random() < 0.6:
            temperature = rng.choice([0.0, 0.0, 0.8])
            params = helpers.greedy(rng.randint(1, 40), temperature=temperature, seed=len(done))
            done.append(engine.add(rng.choice(PROMPTS), params))
            live.append(done[-1])
        if live and rng.random() < 0.03:
            engine.abort(live.pop(rng.randrange(len(live))))
        engine.step()
    assert engine.pages.num_free == engine.pages.num_pages
    return [(request.prompt_token_ids, request.output_token_ids) for request in done]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_give_what_eager_rounds_give(qwen3: Path, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "kv_cache_gib": 0.05, "max_num_seqs": 12}
    options |= options_of(kind, qwen3, tmp_path) | {"page_size": 4}
    graphs = helpers.make_llm(qwen3, max_num_batched_tokens=64, **options)
    tiers: set[int] = set()

    def observe(step: StepOutput) -> None:
        assert step.tier >= step.num_tokens
        tiers.add(step.tier)

    graphs.engine.observers.append(observe)
    found = arrivals(graphs, 1, 60)
    assert graphs.engine.step_stats.steps >= 100 and len(tiers) > 5
    # In float32 these models have no near-ties.
    reference = arrivals(helpers.make_llm(qwen3, max_graph_rows=0, **options), 1, 60)
    for (prompt, got), (same, want) in zip(found, reference, strict=True):
        assert prompt == same
        shorter = min(len(got), len(want))  # aborts fall on other steps
        assert got[:shorter] == want[:shorter]


@pytest.mark.gpu
def test_a_jump_from_the_smallest_tier_to_the_largest_and_back_is_clean(qwen3: Path) -> None:
    options = {"device": "cuda", "kv_cache_gib": 0.05, "max_num_seqs": 12}
    llm = helpers.make_llm(qwen3, **options)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, helpers.greedy(30))
    for _ in range(2):
        assert helpers.token_ids(llm, PROMPTS[:1], helpers.greedy(30)) == want[:1]
        assert helpers.token_ids(llm, PROMPTS, helpers.greedy(30)) == want
    assert {1, 12} <= set(llm.engine.step_stats.tiers)
