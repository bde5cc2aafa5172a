"""Predicted against observed survival: by hand, and as a small engine counts its own rounds."""

import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanospec.calibration import Calibration
from nanospec.types import Draft, StepOutput
from tests import helpers

GOLDEN = Path(__file__).resolve().parent / "data" / "golden" / "A"
PROMPTS = [list(range(3, 16)), list(range(5, 16)), list(range(8, 16)) * 2]


def make_step(
    drafts: Sequence[Draft | None],
    verified: Sequence[int],
    paths: Sequence[list[int]],
    cut: int = 0,
) -> Any:
    """Return what `Calibration` reads of a round; a stop cuts off so many tokens of each path."""
    step = SimpleNamespace(
        drafts=list(drafts),
        counts=[1 + count for count in verified],
        path=list(paths),
        emitted=[[7] * (len(path) - cut) for path in paths],
    )
    step.deepest = functools.partial(StepOutput.deepest, step)
    return step


def observed(*steps: Any) -> dict[str, Any]:
    calibration = Calibration()
    for step in steps:
        calibration(step)
    return calibration.as_dict()


def test_chains_are_counted_by_depth() -> None:
    first = Draft([5, 6, 7], survival=[0.92, 0.71, 0.30])
    second = Draft([5, 6, 7], survival=[0.93, 0.52, 0.40])
    found = observed(make_step([first, second], verified=[3, 2], paths=[[0, 1, 2], [0]]))
    # 0.92 and 0.93 share the bin from 0.90 to 0.95, of which one came true.
    one, two, three = found.pop("depths")
    assert one == {
        "depth": 1,
        "count": 2,
        "mean_predicted": pytest.approx(0.925),
        "mean_observed": 0.5,
        "calibration_error": pytest.approx(0.425),
        "bins": [{"count": 2, "mean_predicted": pytest.approx(0.925), "mean_observed": 0.5}],
    }
    assert (two["depth"], two["count"], two["mean_observed"]) == (2, 2, 0.5)
    assert two["calibration_error"] == pytest.approx((0.52 + (1 - 0.71)) / 2)
    assert [each["mean_predicted"] for each in two["bins"]] == [0.52, 0.71]
    assert (three["count"], three["mean_observed"]) == (1, 0)
    assert three["calibration_error"] == pytest.approx(0.30)
    assert found["count"] == 5 and found["mean_observed"] == 2 / 5
    assert found["calibration_error"] == pytest.approx((0.85 + 0.29 + 0.52 + 0.30) / 5)


def test_a_row_of_a_tree_is_counted_at_its_depth_and_accepted_on_the_path_alone() -> None:
    # Rows 1 and 2 below the root, 3 and 4 below row 1, 5 below 2; row 5 was not verified.
    draft = Draft([5, 6, 7, 8, 9], [0, 0, 1, 1, 2], survival=[0.61, 0.33, 0.41, 0.12, 0.11])
    found = observed(make_step([draft], verified=[4], paths=[[0, 1, 4]]))
    one, two = found["depths"]
    assert (one["count"], one["mean_observed"]) == (2, 0.5)
    assert one["mean_predicted"] == pytest.approx((0.61 + 0.33) / 2)
    assert one["calibration_error"] == pytest.approx((0.39 + 0.33) / 2)
    assert (two["count"], two["mean_observed"]) == (2, 0.5)
    assert two["calibration_error"] == pytest.approx((0.41 + 0.88) / 2)


def test_errors_of_opposite_sign_cancel_within_a_bin_only() -> None:
    apart = [Draft([5], survival=[alive]) for alive in (0.2, 0.8)]
    found = observed(make_step(apart, verified=[1, 1], paths=[[0, 1], [0]]))
    assert found["mean_predicted"] == found["mean_observed"] == 0.5
    assert found["calibration_error"] == pytest.approx(0.8)
    together = [Draft([5], survival=[0.51]), Draft([5], survival=[0.53])]
    found = observed(make_step(together, verified=[1, 1], paths=[[0, 1], [0]]))
    assert found["calibration_error"] == pytest.approx(0.02)


def test_the_outermost_survivals_have_a_bin() -> None:
    found = observed(make_step([Draft([5, 6], survival=[1.0, 0.0])], [2], [[0, 1]]))
    assert found["calibration_error"] == 0
    assert [each["mean_predicted"] for each in found["bins"]] == [0, 1]


def test_survivals_may_be_a_tensor() -> None:
    survival = [0.75, 0.5]
    steps = [
        make_step([Draft([5, 6], survival=own)], [2], [[0, 1]])
        for own in (survival, torch.tensor(survival))
    ]
    assert observed(steps[0]) == observed(steps[1])


def test_what_was_not_verified_or_promises_nothing_does_not_count() -> None:
    drafts = [None, Draft([5]), Draft([5], survival=[0.5])]
    found = observed(make_step(drafts, verified=[0, 1, 0], paths=[[0], [0, 1], [0]]))
    assert found == {
        "count": 0,
        "mean_predicted": 0,
        "mean_observed": 0,
        "calibration_error": 0,
        "bins": [],
        "depths": [],
    }


# Counting them took a drafter with an error of 2 % for one of 8 %: nothing it drafts behind the
# end of an answer is accepted, and it is as sure of that as of the rest.
def test_rows_behind_a_stop_do_not_count() -> None:
    survival = [0.9, 0.8, 0.7, 0.6, 0.5]
    chain = Draft([5, 6, 7, 8, 9], survival=survival)
    found = observed(make_step([chain], verified=[5], paths=[[0, 1, 2, 3]], cut=2))
    assert [(own["count"], own["mean_observed"]) for own in found["depths"]] == [(1, 1), (1, 1)]
    found = observed(make_step([chain], verified=[5], paths=[[0, 1, 2, 3]]))
    assert [own["mean_observed"] for own in found["depths"]] == [1, 1, 1, 0, 0]
    tree = Draft([5, 6, 7, 8, 9], [0, 0, 1, 2, 4], survival=survival)  # 2, 4 and 5 are accepted
    found = observed(make_step([tree], verified=[5], paths=[[0, 2, 4, 5]], cut=2))
    assert [(own["count"], own["mean_observed"]) for own in found["depths"]] == [(2, 0.5), (2, 0.5)]


@pytest.mark.parametrize("speculator", ["dspark", "dspark-tree"])
def test_an_engine_counts_what_its_statistics_count(speculator: str) -> None:
    llm = helpers.make_llm(GOLDEN / "target", draft=str(GOLDEN), speculator=speculator)
    calibration = Calibration()
    llm.engine.observers.append(calibration)
    llm.generate(PROMPTS, helpers.greedy(40))
    found, stats = calibration.as_dict(), llm.stats
    assert found["count"] == stats.verified > 0
    assert found["mean_observed"] * found["count"] == pytest.approx(stats.accepted)
    assert 0 < found["mean_predicted"] < 1
    kept = [own["mean_observed"] * own["count"] for own in found["depths"]]
    assert kept == pytest.approx(stats.kept) and stats.kept[0] > 0
    if speculator == "dspark":
        assert [own["count"] for own in found["depths"]] == stats.offered


def test_an_engine_that_stops_counts_as_its_statistics_do(qwen3: Path) -> None:
    free = helpers.token_ids(helpers.make_llm(qwen3), [[5, 6, 7, 8]], helpers.greedy(20))[0]
    options = {"draft": str(qwen3), "max_draft_len": 6, "adaptive": "threshold:0"}
    llm = helpers.make_llm(qwen3, **options)  # drafts for itself, so every draft is right
    calibration = Calibration()
    llm.engine.observers.append(calibration)
    llm.generate([5, 6, 7, 8], helpers.greedy(20, stop_token_ids=[free[3]]))
    depths = calibration.as_dict()["depths"]
    assert [own["count"] for own in depths] == llm.stats.offered == [1, 1, 1]
    assert all(own["mean_observed"] == 1 for own in depths) and llm.stats.verified == 6
