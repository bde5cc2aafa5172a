"""Warming up covers every kernel, and leaves nothing behind."""

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import nanospec
from nanospec import SamplingParams
from nanospec.config import EMBEDDED_PAIR
from nanospec.engine import warmup
from nanospec.engine.warmup import warm_up
from nanospec.types import PlanKind, Request, Resources
from tests import helpers

PROMPTS = helpers.random_prompts(9, seed=4)


@pytest.mark.parametrize("speculator", ["none", "trie", "dspark", "trie of 1"])
def test_it_changes_no_live_page_and_no_output(
    qwen3: Path, tmp_path: Path, speculator: str
) -> None:
    options: dict[str, Any] = {"speculator": speculator.split()[0], "page_size": 4}
    if "1" in speculator:
        options["max_draft_len"] = 1
    if speculator == "dspark":
        options["draft"] = str(helpers.make_drafter(tmp_path / "drafter", qwen3))
    llm = helpers.make_llm(qwen3, **options)
    want = helpers.token_ids(llm, PROMPTS, helpers.greedy(12))
    ctx, engine = llm.engine._ctx, llm.engine
    live = [cache.k[:, : cache.scratch_slot].clone() for cache in ctx.caches]
    with torch.inference_mode():
        effective, vocab_size = engine.speculator.effective, engine.model_config.vocab_size
        warm_up(ctx, effective, vocab_size, max_rows=100, max_num_seqs=3, max_model_len=60)
    for cache, before in zip(ctx.caches, live, strict=True):
        assert torch.equal(cache.k[:, : cache.scratch_slot], before)
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(12)) == want
    assert engine.pages.num_free == engine.pages.num_pages


def compiled() -> set[str]:
    """Return the variants of our kernels that were compiled so far, by name and specialisation."""
    import triton

    folder = Path(nanospec.__file__).parent
    modules = [
        importlib.import_module(".".join(("nanospec", path.parent.name, path.stem)))
        for path in folder.glob("*/*_triton.py")
    ]
    assert len(modules) >= 7
    kernels = [each for module in modules for each in vars(module).values()]
    return {
        f"{kernel.__name__} {key}"
        for kernel in kernels
        if isinstance(kernel, triton.runtime.jit.JITFunction)
        for caches in kernel.device_caches.values()
        for key in caches[0]
    }


# A tree's probabilities are of fp32 logits, beside a target whose own are bfloat16.
@pytest.mark.parametrize("params", warmup.KINDS[1:], ids=["plain", "filtered"])
def test_drawing_drafts_is_warmed_up_in_fp32(
    params: SamplingParams, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = helpers.make_llm(qwen3).engine
    drawn = []

    def draw_drafts(logits: Any, rows: Any, *_: Any) -> None:
        drawn.append((logits.dtype, logits.shape[1], rows.has_filters))

    monkeypatch.setattr(warmup, "draw_drafts", draw_drafts)
    with torch.inference_mode():
        limits = {"max_rows": 100, "max_num_seqs": 3, "max_model_len": 60}
        warm_up(engine._ctx, engine.speculator.effective, 320, **limits)
    assert (torch.float32, 320, params.top_p < 1) in drawn


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["none", "trie", "dspark", "dspark-tree", "adaptive", "pair", "pair-tree", "eager"]
)
def test_nothing_compiles_after_start_up(qwen3: Path, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "kv_cache_gib": 0.05, "max_num_seqs": 40}
    if kind in ("none", "trie"):
        options["speculator"] = kind
    elif kind in (
        "pair",
        "pair-tree",
        "eager",
    ):  # in bfloat16, which has products of its own for a few rows
        qwen3 = EMBEDDED_PAIR / "target"
        options |= {"dtype": "bfloat16", "draft": str(EMBEDDED_PAIR / "drafter")}
        options |= {"speculator": "dspark-tree" if kind == "pair-tree" else "dspark"}
        options |= {"max_graph_rows": 0 if kind == "eager" else None}
    else:
        options["draft"] = str(helpers.make_drafter(tmp_path / "drafter", qwen3, head_dim=16))
        options["speculator"] = "dspark" if kind == "adaptive" else kind
        options["adaptive"] = "schedule:[[1,99,3]]" if kind == "adaptive" else "off"
    engine = helpers.make_llm(qwen3, max_num_batched_tokens=400, **options).engine
    before, rng = compiled(), random.Random(kind)
    assert before
    while engine.step_stats.steps < 200:
        if rng.random() < 0.5:
            params = helpers.greedy(
                rng.randint(1, 30),
                temperature=rng.choice([0.0, 0.9]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.choice([None, 3]),
                min_tokens=rng.choice([0, 0, 1]),
                ignore_eos=False,
            )
            for _ in range(rng.choice([1, 1, 1, 20])):
                engine.add([rng.randrange(5, 300) for _ in range(rng.randint(1, 200))], params)
        engine.step()
    assert sorted(compiled() - before) == []


@pytest.mark.parametrize("speculator", ["dspark", "dspark-tree"])
def test_drafting_is_warmed_up_without_touching_a_live_page(
    qwen3: Path, tmp_path: Path, speculator: str
) -> None:
    draft = str(helpers.make_drafter(tmp_path / "drafter", qwen3))
    llm = helpers.make_llm(qwen3, speculator=speculator, draft=draft, page_size=4)
    want = helpers.token_ids(llm, PROMPTS, helpers.greedy(12))
    cache = llm.engine._ctx.caches[1]
    before = cache.k[:, : cache.scratch_slot].clone()
    with torch.inference_mode():
        llm.engine.speculator.warm_up(5)
    assert torch.equal(cache.k[:, : cache.scratch_slot], before)
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(12)) == want


# Found in review: powers of two had left out loads for which two programs share a sum.
@pytest.mark.parametrize("plan_rows", [1, 8, 17])
@pytest.mark.parametrize("heads", [(32, 8), (16, 2), (28, 4), (40, 8), (9, 3), (4, 2)])
def test_without_graphs_all_ways_to_launch_attention_are_warmed_up(
    heads: tuple[int, int], plan_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanospec.attention.launch import LaunchShape, launch_shape

    def shape(num_rows: int, num_reqs: int) -> LaunchShape:
        sizes = {"num_rows": num_rows, "num_reqs": num_reqs, "max_rows": plan_rows}
        return launch_shape(**sizes, num_heads=heads[0], num_kv_heads=heads[1], num_sms=132)

    warmed = {shape(1, 1)}  # a launch of its own

    def launch(ctx: Any, resources: Any, vocab_size: int, requests: list[Request]) -> None:
        rows = sum(1 + request.num_planned for request in requests)
        assert rows <= 2048
        warmed.add(shape(rows, len(requests)))

    monkeypatch.setattr(warmup, "_launch", launch)
    ctx = helpers.make_context(helpers.ScriptedRunner([0]))
    resources = Resources(PlanKind.CHAIN, plan_rows)
    warmup._launch_loads(ctx, resources, 50, max_num_seqs=256, max_rows=2048)
    shares = [index / 9 for index in range(10)]  # of the drafts there may be
    loads = [
        (reqs + round(share * reqs * (plan_rows - 1)), reqs)
        for reqs in range(1, 257)
        for share in shares
    ]
    assert {shape(*load) for load in loads if load[0] <= 2048} == warmed
