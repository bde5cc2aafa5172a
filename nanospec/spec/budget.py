"""How many drafts pay for themselves, and whose: costs, the budget, and its split.

The *size* of a budget is chosen on the host from confidences of an earlier round; its *split* goes
by this round's. Chosen from this round's own confidences a budget would bias sampled output, since
a slot's confidence depends on the drafts before it (DSpark paper, arXiv:2607.05147, appendix A).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanospec.errors import ConfigError
from nanospec.text import read_json


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured microseconds of a round's two forwards.

    Up to the largest tier a batch is padded to the next tier, so its cost is that tier's: a step
    function. Above it nothing is padded and costs are interpolated, between points above alone.
    """

    verify: tuple[tuple[int, float], ...]  # (rows, us), rising rows
    draft: tuple[tuple[int, float], ...]  # (requests, us), rising requests
    largest_tier: int  # rows; 0 where nothing is padded
    about: Mapping[str, Any]  # model, device, dtype, ...: what it was measured for

    def __post_init__(self) -> None:
        for name in ("verify", "draft"):
            points = getattr(self, name)
            sizes = [size for size, _ in points]
            if not points or sizes != sorted(set(sizes)) or sizes[0] < 1:
                raise ConfigError(f"the cost table's {name} needs points of rising sizes from 1 on")
            if any(not 0 <= us < float("inf") for _, us in points):
                raise ConfigError(f"the cost table's {name} has a time that is no number")
        if self.largest_tier != 0 and self.largest_tier not in dict(self.verify):
            raise ConfigError(
                f"the cost table's largest_tier={self.largest_tier} is no point of verify"
            )
        if min(us for _, us in self.verify) <= 0:
            raise ConfigError("the cost table's verify times must be above 0")

    def verify_us(self, rows: np.ndarray) -> np.ndarray:
        """Return the cost [N] of forwards of so many rows [N]."""
        return _costs(self.verify, self.largest_tier, rows)

    def draft_us(self, num_requests: int) -> float:
        """Return the cost of drafting for so many requests."""
        return float(_costs(self.draft, 0, np.array([num_requests]))[0])

    def save(self, path: Path) -> None:
        """Write the table as JSON."""
        path.write_text(json.dumps(asdict(self) | {"about": dict(self.about)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, about: Mapping[str, Any]) -> "CostTable":
        """Read a table that was measured for just this.

        Raises:
            ConfigError: it is malformed, or was measured for something else.
        """
        stored = read_json(path)
        try:
            table = cls(
                verify=tuple((int(size), float(us)) for size, us in stored["verify"]),
                draft=tuple((int(size), float(us)) for size, us in stored["draft"]),
                largest_tier=int(stored["largest_tier"]),
                about=dict(stored["about"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is no cost table: {error!r}") from error
        for name, value in about.items():
            if table.about.get(name) != value:
                raise ConfigError(
                    f"{path} was measured with {name}={table.about.get(name)!r}, this is "
                    f"{value!r}; make one by scripts/profile_costs.py"
                )
        return table


def _costs(points: Sequence[tuple[int, float]], largest_tier: int, sizes: np.ndarray) -> np.ndarray:
    """Return the cost of each size; never falling."""
    known = np.array([size for size, _ in points], dtype=np.float64)
    costs = np.maximum.accumulate(np.array([us for _, us in points], dtype=np.float64))
    tiers = int(np.searchsorted(known, largest_tier, side="right"))
    padded = costs[np.minimum(np.searchsorted(known, sizes), len(known) - 1)]
    above, above_costs = known[tiers:], costs[tiers:]
    if len(above) == 0:
        above, above_costs = known[-1:], costs[-1:]
    slope = 0.0
    if len(known) > 1:  # past the last point the last slope goes on
        slope = float(costs[-1] - costs[-2]) / float(known[-1] - known[-2])
    between = np.interp(sizes, above, above_costs)
    beyond = above_costs[-1] + slope * np.maximum(sizes - above[-1], 0)
    open_costs = np.maximum(np.where(sizes > above[-1], beyond, between), costs[max(tiers - 1, 0)])
    return np.where(sizes <= largest_tier, padded, open_costs)


def choose_budget(
    survival: np.ndarray, table: CostTable, *, num_requests: int, num_other_rows: int
) -> int:
    """Return how many drafts, of all requests together, give most tokens per second.

    A round with B drafts emits one token for each request that samples, and one for each draft
    that survives; all B are compared, as costs are a staircase. With B = 0 nothing is drafted.

    Args:
        survival: [N] of the drafts of an *earlier* round, 1 where none is known; as many as this
            round may verify.
        table: costs.
        num_requests: that sample in this round.
        num_other_rows: rows that are no drafts: roots and chunks of prompts.
    """
    if num_requests == 0:
        return 0
    # In float32 many small survivals would vanish beside the sum of the large ones.
    ranked = np.sort(survival.astype(np.float64))[::-1]
    expected = num_requests + np.concatenate(([0.0], np.cumsum(ranked)))
    cost = table.verify_us(num_other_rows + np.arange(len(expected)))
    cost[1:] += table.draft_us(num_requests)
    return int((expected / cost).argmax())


def deal(wanted: Sequence[int], total: int) -> list[int]:
    """Deal a total out, one each at a time, to nobody more than wanted."""
    if sum(wanted) <= total:
        return list(wanted)
    shares = [0] * len(wanted)
    for depth in range(max(wanted, default=0)):
        for index, own in enumerate(wanted):
            if own > depth and total > 0:
                shares[index] += 1
                total -= 1
    return shares


def spread(count: int, most: int) -> list[int]:
    """Return at most so many numbers below a count, as far apart as they can be."""
    most = min(count, most)
    return [index * count // most for index in range(most)]


@dataclass(frozen=True, slots=True)
class Admission:
    """How a budget was split over R requests, and where their rows are; all on the device."""

    counts: Tensor  # [R] int64, leading drafts of each request that are verified
    logit_offsets: Tensor  # [R + 1] int64, where each request's rows start among all roots, drafts
    row_offsets: Tensor  # [R + 1] int64, where they start in the batch, behind the chunks


def admit(
    survival: Tensor, depth: Tensor, num_drafts: Tensor, budget: Tensor, num_chunk_rows: int = 0
) -> Admission:
    """Split a budget over requests. Does not synchronise.

    All drafts are ranked by survival, then depth, then request, then place; the first `budget` are
    admitted. Token values never decide. Along a draft survival must not rise: then what is admitted
    of it is its leading part, up to equal survivals.

    Args:
        survival: [R, K] fp32, 0 or more.
        depth: [R, K] int64, below 128.
        num_drafts: [R] int64, drafts of each request; what is behind them is not there.
        budget: [] int64, at most so many.
        num_chunk_rows: rows of the batch before the first root.
    """
    if survival.is_cuda and survival.numel() > 0:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.spec import budget_triton

        return Admission(*budget_triton.admit(survival, depth, num_drafts, budget, num_chunk_rows))
    return admit_reference(survival, depth, num_drafts, budget, num_chunk_rows)


def admit_reference(
    survival: Tensor, depth: Tensor, num_drafts: Tensor, budget: Tensor, num_chunk_rows: int = 0
) -> Admission:
    """See `admit`."""
    width = survival.shape[1]
    is_there = torch.arange(width, device=survival.device) < num_drafts[:, None]
    by_depth = depth.flatten().sort(stable=True).indices
    keys = torch.where(is_there, survival, -1.0).flatten()[by_depth]
    order = by_depth[keys.sort(descending=True, stable=True).indices]
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = ((rank.view_as(survival) < budget) & is_there).sum(dim=1)
    offsets = torch.nn.functional.pad((1 + counts).cumsum(0), (1, 0))
    return Admission(counts, offsets, offsets + num_chunk_rows)
