"""Shapes for random weights can be loaded, and a coin accepts as often as it says."""

from pathlib import Path

import bench_round
import pytest
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


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="GPU"):
        bench_round.main(["--shapes", "qwen3-8b"])
