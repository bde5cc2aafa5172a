"""Temperatures that make promised survival come true; what counts as offered and as kept."""

import json
from pathlib import Path

import calibrate_confidence
import pytest
import torch
from calibrate_confidence import (
    Rounds,
    calibration_error,
    collect,
    fit,
    identity,
    store,
    survival_error,
)

from nanospec.models.dspark import CALIBRATION, DSparkConfig
from nanospec.types import as_list
from tests import helpers

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "A"


def simulated(count: int, true: torch.Tensor, seed: int) -> Rounds:
    """Return rounds whose confidences come true under a scaling [G, 2]."""
    generator = torch.Generator().manual_seed(seed)
    size = len(true)
    logits = torch.randn(count, size, generator=generator) * 2 + 1.5
    truth = (logits / true[:, 0] + true[:, 1]).sigmoid()
    kept = torch.rand(count, size, generator=generator) < truth
    accepted = kept.long().cumprod(dim=1).sum(dim=1)
    return Rounds(logits, torch.full((count,), size), accepted, torch.arange(count))


def test_fitting_finds_the_scaling_and_lowers_the_error_on_other_rounds() -> None:
    true = torch.tensor([[2.0, 0.0], [0.5, -0.5], [1.0, 0.75]])
    found = fit(simulated(40_000, true, seed=0))
    assert torch.allclose(found[:, 0].log2(), true[:, 0].log2(), atol=0.3)
    assert torch.allclose(found[:, 1], true[:, 1], atol=0.3)
    test = simulated(40_000, true, seed=1)
    before, _ = survival_error(test, identity(3))
    after, each = survival_error(test, found)
    assert after < 0.01 < 0.04 < before and len(each) == 3


def test_the_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    promised = torch.tensor([0.1, 0.1, 0.9, 0.9])
    happened = torch.tensor([False, False, True, False])
    assert calibration_error(promised, happened) == pytest.approx((2 * 0.1 + 2 * 0.4) / 4)
    exact = torch.full((1000,), 0.25)
    assert calibration_error(exact, torch.arange(1000) < 250) == pytest.approx(0)


def test_slots_that_were_not_offered_do_not_count() -> None:
    rounds = Rounds(
        logits=torch.full((4, 2), 20.0),
        offered=torch.tensor([2, 2, 1, 1]),
        accepted=torch.tensor([2, 2, 1, 1]),
        request=torch.arange(4),
    )
    assert survival_error(rounds, identity(2))[0] == pytest.approx(0, abs=1e-6)


def test_rounds_are_recorded_as_the_engine_counts_them(drafter: Path) -> None:
    llm = helpers.make_llm(GOLDEN / "target", draft=str(drafter))
    prompt = list(range(3, 16))
    params = helpers.greedy(40, ignore_eos=False, stop_token_ids=[100])
    prompts = [prompt, prompt[2:], prompt[5:] * 2]
    rounds = collect(llm, prompts, params)
    stats = llm.stats
    assert len(rounds.logits) == stats.rounds
    slots = range(len(stats.offered))
    assert [int((rounds.offered > slot).sum()) for slot in slots] == stats.offered
    assert [int((rounds.accepted > slot).sum()) for slot in slots] == stats.kept


def test_stored_scalings_are_applied_at_load_but_not_when_fitting(drafter: Path) -> None:
    options = {"draft": str(drafter)}
    plain = helpers.make_llm(GOLDEN / "target", **options)
    prompts = [list(range(3, 16))]
    raw = collect(plain, prompts, helpers.greedy(20))
    half, other = [[0.5, 0.25]] * 7, [[3.0, -1.0]] * 7
    store(drafter, {"greedy": {"scaling": half}, "sampled": {"scaling": other}})
    assert DSparkConfig.from_folder(drafter).calibration["sampled"] == ((3.0, -1.0),) * 7
    again = collect(helpers.make_llm(GOLDEN / "target", **options), prompts, helpers.greedy(20))
    torch.testing.assert_close(raw.logits, again.logits)
    llm = helpers.make_llm(GOLDEN / "target", **options)
    served: list[list[float]] = []
    llm.engine.observers.append(
        lambda step: served.extend(
            as_list(d.survival) for d in step.drafts if d and d.survival is not None
        )
    )
    llm.generate(prompts, helpers.greedy(20))
    want = raw.survival(torch.tensor(half))
    for row, own in zip(want.tolist(), served, strict=True):
        assert own == pytest.approx(row[: len(own)], abs=1e-4)


def test_the_script_writes_the_calibration_and_prints_it(
    drafter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"--model {GOLDEN / 'target'} --draft {drafter} --prompts {prompts} --max-tokens 12"
    calibrate_confidence.main([*command.split(), "--device", "cpu"])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    stored = json.loads((drafter / CALIBRATION).read_text())
    assert {name: own["scaling"] for name, own in printed["calibration"].items()} == stored


def test_a_drafter_without_confidences_is_not_calibrated(
    qwen3: Path, dflash: Path, prompts: Path
) -> None:
    command = f"--model {qwen3} --draft {dflash} --prompts {prompts} --max-tokens 9 --device cpu"
    with pytest.raises(SystemExit, match="no confidence head"):
        calibrate_confidence.main(command.split())


def test_rounds_without_drafts_are_nothing_to_calibrate_on(drafter: Path, prompts: Path) -> None:
    command = f"--model {GOLDEN / 'target'} --draft {drafter} --prompts {prompts} --max-tokens 1"
    with pytest.raises(SystemExit, match="--max-tokens"):
        calibrate_confidence.main([*command.split(), "--device", "cpu"])
