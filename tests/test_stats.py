"""Counts add up, and what a stop cut off is nowhere in them."""

from nanospec.stats import Stats


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
