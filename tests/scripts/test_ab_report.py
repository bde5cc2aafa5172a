"""Figures of a comparison follow from records as a reader would count them."""

import math
import sys
from pathlib import Path
from typing import Any

import ab_report
import pytest
from ab_report import (
    acceptance_length,
    first_difference,
    forks,
    is_near_tie,
    pair,
    percentile,
    summarise,
    time_per_token,
)


def record(
    *emissions: tuple[float, int | None],
    ids: list[int] | None = None,
    admitted: float = 0.0,
    text: str = "",
) -> dict[str, Any]:
    """Return what `drive` would have noted; ids count up unless given."""
    counts = [tokens for _, tokens in emissions]
    known = None if None in counts else sum(each or 0 for each in counts)
    return {
        "admitted": admitted,
        "emissions": list(emissions),
        "token_ids": ids if ids is not None or known is None else list(range(known)),
        "num_tokens": 10 if known is None else known,
        "text": text,
        "finish_reason": "stop",
    }


def test_first_emission_and_last_round_do_not_count() -> None:
    long = record((1.0, 1), (2.0, 5), (3.0, 2), (4.0, 8))
    short = record((1.0, 1), (2.0, 7))
    assert acceptance_length([long]) == 3.5
    assert acceptance_length([long, short, record((1.0, 1))]) == 3.5
    assert acceptance_length([short]) is None
    assert acceptance_length([record((1.0, None), (2.0, None), (3.0, None))]) is None


def test_percentiles_are_observed_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(i) for i in range(1, 201)], 0.99) == 198.0
    assert percentile([1.0], 0.5) == 1.0


def test_rates_and_times_of_two_requests() -> None:
    one = record((1.0, 1), (2.0, 4), (3.0, 5))  # 10 tokens in 3 s
    other = record((2.5, 1), (4.0, 3), admitted=2.0)  # 4 tokens in 2 s
    row = summarise("mine", "spec", 2, [[one, other]])
    assert row["prompts"] == 2 and row["output_tokens"] == 14
    assert row["tokens_per_second"] == 14 / 4
    assert row["tokens_per_second_per_request"] == pytest.approx((10 / 3 + 2) / 2)
    assert row["ttft_ms"] == {"median": 750.0, "p99": 1000.0}
    assert row["tpot_ms"]["p99"] == 500.0
    assert row["tpot_ms"]["median"] == pytest.approx(1e3 * (2 / 9 + 0.5) / 2)
    assert row["acceptance_length"] == 4.0 and row["accuracy"] is None
    assert time_per_token(record((1.0, 1))) is None
    assert time_per_token(record((1.0, None), (4.0, None))) == 3 / 9


def test_of_repeats_the_median_rate_counts_and_the_error_stays() -> None:
    fast, slow = record((1.0, 1), (2.0, 9), text="4"), record((1.0, 1), (10.0, 9), text="4")
    wrong = record((1.0, 1), (2.0, 9), text="5")
    repeats = [[fast, wrong], [slow, wrong], [fast, wrong]]
    row = summarise("mine", "none", 1, repeats, lambda _, text: text == "4")
    assert row["tokens_per_second"] == 10.0 and len(row["tokens_per_second_of_repeats"]) == 3
    assert (row["accuracy"], row["accuracy_error"]) == (0.5, math.sqrt(0.25 / 2))


def test_outputs_part_at_a_token_an_end_or_a_character() -> None:
    one = record((1.0, 3), ids=[7, 8, 9], text="abc")
    assert first_difference(one, record((1.0, 3), ids=[7, 8, 9])) is None
    assert first_difference(one, record((1.0, 3), ids=[7, 5, 9])) == 1
    assert first_difference(one, record((1.0, 2), ids=[7, 8])) == 2
    assert first_difference(one, record((1.0, None), text="abd")) == 2
    assert first_difference(one, record((1.0, None), text="abc")) is None


def test_a_fork_names_what_is_common_and_both_tokens() -> None:
    ones = [record((1.0, 3), ids=ids) for ids in ([7, 8, 9], [1, 2, 3], [4, 4, 4])]
    others = [record((1.0, 3), ids=ids) for ids in ([7, 8, 9], [1, 5, 3], [4, 4])]
    assert forks(ones, others) == [
        {"prompt": 1, "position": 1, "common": [1], "tokens": [2, 5]},
        {"prompt": 2, "position": 2, "common": None, "tokens": None},
    ]


NEAR = {"gap": 0.01, "behind": 0.01, "between": 0.01, "noise": 0.01, "step": 0.001}
FAR = NEAR | {"behind": 1.0, "between": 1.0}  # a third token was taken


def test_a_tie_is_near_only_if_both_tokens_are_in_it() -> None:
    assert is_near_tie(NEAR) and not is_near_tie(FAR)
    assert not is_near_tie(NEAR | {"noise": 0.0})
    assert is_near_tie(NEAR | {"gap": 0.0, "behind": 0.0, "noise": 0.0})  # an exact one


def row(engine: str, speed: float, **changes: Any) -> dict[str, Any]:
    own = [record((1.0, 1), (2.0, 4), (3.0, 5), text="4") for _ in range(10)]
    found = summarise(engine, "spec", 8, [own], lambda _, text: text == "4")
    return found | {"tokens_per_second": speed} | changes


def fork(gap: dict[str, float] | None) -> dict[str, Any]:
    return {"prompt": 1, "position": 4, "common": [1, 2], "tokens": [3, 4], "gap": gap}


def test_what_must_hold_is_judged() -> None:
    good = pair(row("nanospec", 20.0), row("vllm", 10.0), [])
    assert good["speed_ratio"] == 2.0 and good["identical"] == 1.0
    assert set(good["holds"]) == {"faster", "acceptance", "accuracy", "outputs"}
    assert all(good["holds"].values())
    near = pair(row("nanospec", 20.0), row("vllm", 10.0), [fork(NEAR)])
    assert near["identical"] == 0.9 and near["holds"]["outputs"]
    worse = row("vllm", 30.0, acceptance_length=4.2, accuracy=0.8, accuracy_error=0.1)
    bad = pair(row("nanospec", 20.0), worse, [fork(NEAR), fork(FAR), fork(None)])
    assert not any(bad["holds"].values()) and bad["num_near_ties"] == 1
    assert "common" not in bad["forks"][0]
    void = pair(row("nanospec", 20.0), row("vllm", 10.0, accuracy=None), None)
    assert void["identical"] is None and set(void["holds"]) == {"faster", "acceptance"}


def document() -> dict[str, Any]:
    rows = [row("nanospec", 20.0), row("vllm", 30.0), row("vllm", 9.0, mode="none", ttft_ms=None)]
    return {
        "argv": ["ab_vllm.py", "--limit", "10"],
        "commit": "abc",
        "hardware": "a CPU",
        "versions": {"torch": "2"},
        "failed": ["vllm adaptive, seed 0"],
        "rows": rows,
        "pairs": [pair(rows[0], rows[1], [fork(NEAR), fork(FAR)])],
    }


def test_tables_and_report_say_what_does_not_hold() -> None:
    own = document()
    lines = ab_report.as_text(ab_report.rows_as_cells(own["rows"])).splitlines()
    assert lines[0].split()[:3] == ["concurrency", "mode", "engine"] and len(lines) == 4
    assert "100.0% ± 0.0%" in lines[1]
    assert "0.67x*" in ab_report.as_text(ab_report.pairs_as_cells(own["pairs"]))
    text = ab_report.markdown(own, "ab.png")
    assert text.startswith("# nanospec against vllm\n")
    assert "Failed: vllm adaptive" in text and "(ab.png)" in text
    assert "prompt 1 at 4, gap 0.01, behind 1, noise 0.01, step 0.001" in text
    assert text.count("prompt 1 at 4") == 1  # the near-tie is no news
    assert "![" not in ab_report.markdown(own, None)


def test_throughput_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ab_report.plot(tmp_path / "ab.png", document()["rows"])
    assert (tmp_path / "ab.png").stat().st_size > 5000


def test_a_missing_matplotlib_is_the_callers_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError):
        ab_report.plot(tmp_path / "ab.png", document()["rows"])
