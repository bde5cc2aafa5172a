"""Graphs replay what an eager run gives, whatever the batch, and write nowhere else."""

import random
from pathlib import Path
from typing import Any

import pytest

from nanospec import LLM
from nanospec.config import EMBEDDED_PAIR, EngineConfig
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


def arrivals(llm: LLM, seed: int, rounds: int) -> list[tuple[list[int], list[int]]]:
    """Run requests that come and go for so many rounds; return prompts and what was made of them.

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
    return [(request.prompt_token_ids, request.output_token_ids) for request in done]


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
    for (prompt, got), (same, want) in zip(found, reference, strict=True):
        assert prompt == same
        shorter = min(len(got), len(want))  # after an abort
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
