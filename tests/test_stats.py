"""Counts add up, and what a stop cut off is nowhere in them."""

import pytest

from nanospec.stats import Stats, StepStats


def test_rounds_count_what_was_offered_and_kept_by_depth() -> None:
    stats = Stats()
    stats.count_round(verified=3, depth=3, accepted=1, emitted=2)
    stats.count_round(verified=1, depth=1, accepted=1, emitted=2)
    stats.count_round(verified=0, depth=0, accepted=0, emitted=1)
    assert (stats.rounds, stats.verified, stats.accepted) == (3, 4, 2)
    assert (stats.offered, stats.kept) == ([2, 1, 1], [2, 0, 0])
    assert stats.acceptance_length == 5 / 3 and stats.acceptance_rates == [1.0, 0.0, 0.0]


# Other engines: vllm 56101, sglang 39826 (counters that go beyond the output).
def test_what_a_stop_cut_is_neither_kept_nor_offered() -> None:
    stats = Stats()
    stats.count_round(verified=5, depth=5, accepted=4, emitted=2)
    assert (stats.accepted, stats.emitted) == (2, 2)
    assert (stats.offered, stats.kept) == ([1, 1], [1, 1])


def test_stats_add_up_to_the_longer_depth() -> None:
    total = Stats(seconds=3.0)
    for depth in (1, 3):
        own = Stats(tokens=depth, seconds=9.0)
        own.count_round(verified=depth, depth=depth, accepted=depth, emitted=depth + 1)
        total.add(own)
    assert (total.tokens, total.rounds, total.seconds) == (4, 2, 3.0)
    assert (total.offered, total.kept) == ([2, 1, 1], [2, 1, 1])


def test_steps_are_counted_with_their_padding_and_predictions() -> None:
    stats = StepStats()
    stats.count_step(rows=17, tier=18, budget=13, seconds=2e-3, predicted_us=None)
    stats.count_step(rows=18, tier=18, budget=14, seconds=3e-3, predicted_us=2e3)
    stats.count_step(rows=4, tier=4, budget=0, seconds=1e-3, predicted_us=2e3)
    found = stats.as_dict()
    assert (found["steps"], found["rows"], found["padding"], found["budget"]) == (3, 39, 1, 27)
    assert found["tiers"] == {4: 1, 18: 2}
    assert found["predicted_steps"] == 2
    for name, want in (("predicted", 4e-3), ("measured", 4e-3), ("missed", 2e-3)):
        assert found[f"{name}_seconds"] == pytest.approx(want)
    assert "2.6% padding" in stats.summary() and "50% apart" in stats.summary()
