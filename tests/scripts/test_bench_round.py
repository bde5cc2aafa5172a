"""Shapes for random weights can be loaded, and a coin accepts as often as it says."""

from pathlib import Path

import bench_round
import pytest
from round_steps import STEPS, WAIT, step_times, timed_steps, work_of_forward
from shapes import SHAPES, write_shapes
from synthetic import SyntheticDSpark

from nanospec import LLM
from nanospec.config import ModelConfig
from nanospec.models.dspark import DSparkConfig
from nanospec.spec.registry import SPECULATORS
from tests import helpers


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_are_of_a_target_and_its_drafter(tmp_path: Path, name: str) -> None:
    target, drafter = write_shapes(name, tmp_path)
    DSparkConfig.from_folder(drafter).check_target(ModelConfig.from_folder(target))


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_drafts_are_accepted_by_coin(
    qwen3: Path, tmp_path: Path, run_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = type("Synthetic", (SyntheticDSpark,), {"mean": 0.8})
    monkeypatch.setitem(SPECULATORS, "synthetic", own)
    draft = helpers.make_drafter(tmp_path / "drafter", qwen3)
    options = {"speculator": "synthetic", "draft": str(draft), "run_ahead": run_ahead}
    llm: LLM = helpers.make_llm(qwen3, **options)
    llm.generate(helpers.random_prompts(40, seed=1), helpers.greedy(60))
    want = sum(0.8**depth for depth in range(8))
    assert llm.stats.acceptance_length == pytest.approx(want, rel=0.12)
    assert llm.stats.acceptance_rates == sorted(llm.stats.acceptance_rates, reverse=True)


def test_without_drafts_nothing_is_tossed_for(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECULATORS, "synthetic", SyntheticDSpark)
    draft = helpers.make_drafter(tmp_path / "drafter", qwen3)
    options = {"draft": str(draft), "adaptive": "schedule:[[1,99,0]]"}
    plain = helpers.make_llm(qwen3, speculator="synthetic", **options)
    prompts, params = helpers.random_prompts(3, seed=1), helpers.greedy(20)
    want = helpers.token_ids(helpers.make_llm(qwen3), prompts, params)
    monkeypatch.setattr("synthetic.sample_at", None)  # draws targets where coins are tossed
    assert helpers.token_ids(plain, prompts, params) == want


def test_context_is_the_mean_length_halfway_through_what_is_timed(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    engine = helpers.make_llm(qwen3, run_ahead="off").engine
    prompts = [[5] * 10, [6] * 20]
    requests = [engine.add(prompt, helpers.greedy(99)) for prompt in prompts]
    while any(request.num_output < 2 for request in requests):
        engine.step()
    found = bench_round.stretch(engine, requests, 8)
    assert [request.num_output for request in requests] == [10, 10]
    assert found["context"] == 15 + 2 + 8 / 2
    assert found["tokens_per_step"] == found["rows_per_step"] == 2


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_every_step_of_a_round_is_timed_and_nothing_stays_patched(
    qwen3: Path, tmp_path: Path, run_ahead: str
) -> None:
    draft = helpers.make_drafter(tmp_path / "drafter", qwen3)
    llm = helpers.make_llm(qwen3, speculator="dspark", draft=str(draft), run_ahead=run_ahead)
    want = helpers.token_ids(llm, helpers.random_prompts(3, seed=1), helpers.greedy(20))
    before = llm.engine.step_stats.steps
    with timed_steps(llm.engine) as spans:
        got = helpers.token_ids(llm, helpers.random_prompts(3, seed=1), helpers.greedy(20))
    assert got == want
    rounds = llm.engine.step_stats.steps - before
    assert {name for name, _, _ in spans} == {*STEPS, WAIT}
    assert sum(name == "forward" for name, _, _ in spans) == rounds
    times = step_times(spans, rounds)
    assert all(times["host_ms"][name] > 0 for name in STEPS)
    assert set(times["device_ms"].values()) == {0.0}  # there is none
    seen = len(spans)
    helpers.token_ids(llm, helpers.random_prompts(1, seed=1), helpers.greedy(5))
    assert len(spans) == seen


def test_a_forward_reads_weights_and_keys_once_and_multiplies_every_row(qwen3: Path) -> None:
    llm = helpers.make_llm(qwen3)
    decoder = llm.engine._ctx.runner._target  # type: ignore[attr-defined]
    config = decoder.config
    empty, _ = work_of_forward(decoder, 1, 1, 0)
    full, one = work_of_forward(decoder, 1, 1, 10)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert full - empty == 10 * per_token
    assert empty == 4 * one / 2
    assert work_of_forward(decoder, 3, 3, 10)[1] == 3 * one


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="GPU"):
        bench_round.main(["--shapes", "qwen3-8b"])
