"""Costs by the rules of padded tiers; the budget and its split against brute force."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanospec.errors import ConfigError
from nanospec.spec.budget import CostTable, admit, admit_reference, choose_budget, deal

ABOUT = {"model": "m", "device": "d"}


def table(verify: list[tuple[int, float]], draft: float = 0.0, tier: int = 0) -> CostTable:
    return CostTable(tuple(verify), ((1, draft),), tier, ABOUT)


def costs(own: CostTable, *rows: int) -> list[float]:
    return own.verify_us(np.array(rows)).tolist()


def test_a_padded_batch_costs_its_tier() -> None:
    own = table([(1, 10), (4, 12), (8, 20)], tier=8)
    assert costs(own, 1, 2, 4, 5, 8) == [10, 12, 12, 20, 20]


def test_above_the_largest_tier_costs_are_interpolated_between_points_above() -> None:
    own = table([(4, 10), (8, 20), (16, 30), (32, 62)], tier=8)
    assert costs(own, 8, 9, 16, 24, 32, 48) == [20, 30, 30, 46, 62, 94]
    one_above = table([(4, 100), (8, 200), (32, 1000)], tier=8)
    assert costs(one_above, 8, 9, 20, 32) == [200, 1000, 1000, 1000]  # never across the limit


def test_past_the_last_point_the_last_slope_goes_on() -> None:
    assert costs(table([(2, 10), (4, 14)]), 8) == [22]
    assert costs(table([(4, 14)]), 400) == [14]
    assert costs(table([(4, 10), (8, 18)], tier=8), 12) == [26]


def test_costs_never_fall() -> None:
    own = table([(1, 10), (4, 8), (8, 20), (16, 15), (32, 16)], tier=8)
    found = costs(own, *range(1, 100))
    assert found == sorted(found) and found[3] == 10


@pytest.mark.parametrize(
    "verify",
    [[], [(4, 1.0), (2, 2.0)], [(0, 1.0)], [(1, 0.0)], [(1, float("nan"))], [(1, float("inf"))]],
)
def test_a_table_that_says_nothing_is_refused(verify: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigError, match="cost table"):
        table(verify)


def test_a_table_is_stored_and_refused_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    own = table([(1, 10.0), (4, 12.5)], draft=3.0, tier=4)
    own.save(path)
    assert CostTable.load(path, ABOUT) == own
    with pytest.raises(ConfigError, match=r"model='m'.*'other'.*profile_costs"):
        CostTable.load(path, ABOUT | {"model": "other"})
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no cost table"):
        CostTable.load(path, ABOUT)


def random_case(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, 5))
    sizes = np.sort(rng.choice(np.arange(1, 40), size=int(rng.integers(1, 6)), replace=False))
    verify = [
        (int(size), float(us))
        for size, us in zip(sizes, rng.uniform(1, 30, len(sizes)), strict=True)
    ]
    return {
        "survival": rng.choice([0.0, 0.25, 0.5, 0.9, 1.0], size=int(rng.integers(0, 13))),
        "table": table(verify, draft=float(rng.uniform(0, 10)), tier=int(rng.choice([0, *sizes]))),
        "num_requests": int(rng.integers(0, num_reqs + 1)),
        "num_other_rows": num_reqs,
    }


@pytest.mark.parametrize("seed", range(300))
def test_the_budget_is_the_best_of_all(seed: int) -> None:
    case = random_case(seed)
    found = choose_budget(**case)
    if case["num_requests"] == 0:
        assert found == 0
        return
    ranked = sorted(case["survival"], reverse=True)
    gains = []
    for size in range(len(ranked) + 1):
        cost = costs(case["table"], case["num_other_rows"] + size)[0]
        cost += case["table"].draft_us(case["num_requests"]) if size else 0.0
        gains.append((case["num_requests"] + sum(ranked[:size])) / cost)
    assert gains[found] == pytest.approx(max(gains))


def test_a_steep_table_asks_for_nothing_and_a_flat_one_for_everything() -> None:
    survival = np.array([0.9, 0.8, 0.1] * 4)
    options: dict[str, Any] = {"num_requests": 4, "num_other_rows": 4}
    steep = table([(4, 1.0), (5, 100.0), (50, 10_000.0)])
    assert choose_budget(survival, steep, **options) == 0
    assert choose_budget(survival, table([(1, 10.0)]), **options) == 12


def split_case(seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return survival, depth [R, K], lengths [R] and a budget; many survivals are equal."""
    rng = np.random.default_rng(seed)
    num_reqs, width = int(rng.integers(1, 6)), int(rng.integers(0, 8))
    steps = rng.choice([1.0, 1.0, 0.5, 0.8], size=(num_reqs, width))
    survival = torch.tensor(steps.cumprod(axis=1), dtype=torch.float32).view(num_reqs, width)
    depth = torch.arange(1, width + 1).expand(num_reqs, -1).contiguous()
    if seed % 2:  # trees: siblings share a depth
        depth = torch.tensor(rng.integers(1, 4, size=(num_reqs, width))).view(num_reqs, width)
    lengths = torch.tensor(rng.integers(0, width + 1, num_reqs))
    return survival, depth, lengths, int(rng.integers(0, num_reqs * width + 3))


def test_a_small_survival_counts_beside_large_ones() -> None:
    survival = np.array([1.0] * 64 + [1e-9], dtype=np.float32)
    assert choose_budget(survival, table([(1, 10.0)]), num_requests=64, num_other_rows=64) == 65


@pytest.mark.parametrize("seed", range(200))
def test_the_split_is_the_first_of_the_ranking(seed: int) -> None:
    survival, depth, lengths, budget = split_case(seed)
    slots = [
        (-float(survival[r, k]), int(depth[r, k]), r, k)
        for r, k in itertools.product(*map(range, survival.shape))
        if k < lengths[r]
    ]
    want = [0] * len(survival)
    for _, _, request, _ in sorted(slots)[:budget]:
        want[request] += 1
    found = admit(survival, depth, lengths, torch.tensor(budget), 5)
    assert found.counts.tolist() == want and sum(want) == min(budget, len(slots))
    starts = [0, *itertools.accumulate(1 + count for count in want)]
    assert found.logit_offsets.tolist() == starts
    assert found.row_offsets.tolist() == [5 + start for start in starts]


def check_kernel(
    survival: Tensor, depth: Tensor, lengths: Tensor, budget: int, device: torch.device
) -> None:
    from nanospec.spec import budget_triton

    case = [each.to(device) for each in (survival, depth, lengths, torch.tensor(budget))]
    want = admit_reference(*case, num_chunk_rows=3)
    found = budget_triton.admit(*case, num_chunk_rows=3)
    fields = (want.counts, want.logit_offsets, want.row_offsets)
    for got, expected in zip(found, fields, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(24))
def test_the_kernel_splits_as_the_reference(seed: int, device: torch.device) -> None:
    survival, *rest = split_case(seed)
    if survival.numel() > 0:
        check_kernel(survival, *rest, device)


@pytest.mark.parametrize(("num_reqs", "width"), [(256, 16), (37, 63), (1, 1), (3, 5)])
@pytest.mark.parametrize("has_ties", [False, True])
def test_the_kernel_splits_a_full_batch(
    num_reqs: int, width: int, has_ties: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_reqs)
    steps = torch.rand(num_reqs, width, generator=generator) ** 0.2
    survival = ((steps * 4).round() / 4 if has_ties else steps).cumprod(dim=1)
    lengths = torch.randint(0, width + 1, (num_reqs,), generator=generator)
    depth = torch.arange(1, width + 1).expand(num_reqs, -1).contiguous()
    total = int(lengths.sum())
    for budget in (0, 1, total // 3, total - 1, total, total + 7):
        check_kernel(survival, depth, lengths, budget, device)


@pytest.mark.gpu
def test_a_full_batch_is_split_in_under_40_us(device: torch.device) -> None:
    """256 requests of 16 drafts, in a graph; as the clock of the GPU sees it."""
    survival = (torch.rand(256, 16, device=device) ** 0.2).cumprod(dim=1)
    depth = torch.arange(1, 17, device=device).expand(256, -1).contiguous()
    lengths = torch.full((256,), 16, device=device)
    budget = torch.tensor(1500, device=device)
    for spread, name in ((survival, "distinct"), ((survival * 4).round() / 4, "ties")):
        admit(spread, depth, lengths, budget)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                admit(spread, depth, lengths, budget)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        micros = start.elapsed_time(end) * 1e3 / 20
        print(f"admit, {name}: {micros:.1f} us")
        assert micros < 40


@pytest.mark.parametrize(
    ("total", "want"), [(5, [2, 3]), (9, [2, 3]), (4, [2, 2]), (3, [2, 1]), (0, [0, 0])]
)
def test_no_more_is_dealt_out_than_there_is(total: int, want: list[int]) -> None:
    assert deal([2, 3], total) == want
