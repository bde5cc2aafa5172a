"""Adaptive verification: every round, which of the drafts that were made are worth verifying.

A policy speaks twice a round. `candidate_budget`, before drafts are made, says how many may be;
`admit`, once the round's rows are known, lowers each request's `max_drafts` to what is verified.
What keeps that lossless: survivals decide, never token values; and how *many* drafts of all are
verified never depends on the survivals that are chosen from.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanospec.config import EngineConfig, parse_adaptive
from nanospec.spec.budget import CostTable, admit, choose_budget
from nanospec.types import Budget, EngineView, Request

PROBE_ROUNDS = 32  # while nothing is drafted, try again so often


class Policy:
    """Verifies every draft that was made: `adaptive=off`."""

    needs_survival = False  # whether drafts must say how probably they survive

    def candidate_budget(self, view: EngineView, most: int) -> Budget:
        """Return how many drafts may be made for the next round, `most` of a request."""
        return Budget(view.num_running * most, 1 + most)

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> float | None:
        """Lower `max_drafts` of requests to what this round verifies.

        Synchronises where survivals are on a GPU: the counts are read, as attention plans on the
        host.

        Args:
            requests: R, those that sample. `max_drafts` says what there are pages and rows for.
            num_other_rows: rows of the forward that are no drafts.

        Returns:
            Microseconds that the round should take; None where costs are not known.
        """
        del requests, num_other_rows
        return None


class Schedule(Policy):
    """N * K drafts for N requests that have any, K by the requests of the round.

    Survival decides whose they are.
    """

    needs_survival = True

    def __init__(self, rows: Sequence[tuple[int, int, int]]):
        self._rows = rows  # from, to, drafts of a request on average

    def candidate_budget(self, view: EngineView, most: int) -> Budget:
        """See `Policy.candidate_budget`. A request may get more than the average."""
        drafts = self._mean(view.num_running) > 0
        return Budget(view.num_running * most, 1 + most) if drafts else Budget(0, 1)

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> float | None:
        """See `Policy.admit`."""
        del num_other_rows
        drafting = sum(request.num_planned > 0 for request in requests)
        share_out(requests, drafting * self._mean(len(requests)))
        return None

    def _mean(self, num_requests: int) -> int:
        means = (mean for first, last, mean in self._rows if first <= num_requests <= last)
        return next(means, 0)


class Threshold(Policy):
    """Verifies a request's drafts while their survival is no less than a bound."""

    needs_survival = True

    def __init__(self, bound: float):
        self._bound = bound

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> float | None:
        """See `Policy.admit`."""
        del num_other_rows
        drafting = [request for request in requests if request.num_planned > 0]
        if drafting:
            enough = planned_survival(drafting) >= self._bound
            counts = enough.long().cumprod(dim=1).sum(dim=1)
            for request, count in zip(drafting, counts.tolist(), strict=True):
                request.max_drafts = count
        return None


class Costs(Policy):
    """As many drafts as give most tokens per second by a cost table: `adaptive=auto`.

    The budget is chosen from survivals of an earlier round; a request without any counts as sure
    of its drafts. Without drafts there would be no new survivals, and 0 for ever: every
    `PROBE_ROUNDS` rounds, and whenever another number of requests runs, there is a probe. It makes
    drafts and verifies one a request at least, so that estimators learn, and the round after it
    decides by what the probe has shown.
    """

    needs_survival = True

    def __init__(self, table: CostTable):
        self._table = table
        self._known: dict[Request, np.ndarray] = {}  # survivals of an earlier round
        self._copy: _HostCopy | None = None  # those of the last round, on their way here
        self._rounds_off: int | None = None  # rounds since drafting stopped; None: it goes on
        self._running_then: int | None = None
        self._is_probe = False

    def candidate_budget(self, view: EngineView, most: int) -> Budget:
        """See `Policy.candidate_budget`."""
        if self._rounds_off is not None:
            self._rounds_off += 1
            if self._running_then is None:
                self._running_then = view.num_running
            if view.num_running == self._running_then and self._rounds_off < PROBE_ROUNDS:
                return Budget(0, 1)
            self._is_probe = True
        self._rounds_off = None
        return Budget(view.num_running * most, 1 + most)

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> float | None:
        """See `Policy.admit`."""
        drafting = [request for request in requests if request.num_planned > 0]
        if not drafting:
            return float(self._table.verify_us(np.array([num_other_rows]))[0])
        if self._copy is not None:
            self._known |= self._copy.read()
        budget = choose_budget(
            np.concatenate([self._expected(request) for request in drafting]),
            self._table,
            num_requests=len(requests),
            num_other_rows=num_other_rows,
        )
        if self._is_probe:  # decided before this round's drafts were made
            budget = max(budget, len(drafting))
            self._is_probe = False
        elif budget == 0:
            self._rounds_off, self._running_then = 0, None
        self._copy = _HostCopy(drafting, planned_survival(drafting))
        share_out(requests, budget)
        self._known = {each: own for each, own in self._known.items() if not each.is_finished}
        cost = float(self._table.verify_us(np.array([num_other_rows + budget]))[0])
        return cost + (self._table.draft_us(len(requests)) if budget else 0.0)

    def _expected(self, request: Request) -> np.ndarray:
        """Return survivals of an earlier round, [K], for as many drafts as there are now."""
        count = request.num_planned
        earlier = self._known.get(request)
        if earlier is None:
            return np.ones(count)
        return np.pad(earlier[:count], (0, max(count - len(earlier), 0)), mode="edge")


class _HostCopy:
    """Survivals on their way to the host. Nobody waits: they are read a round later."""

    def __init__(self, requests: Sequence[Request], survival: Tensor):
        self._counts = {request: request.num_planned for request in requests}
        self._values = survival.to("cpu", non_blocking=True)  # pinned, where it comes from a GPU
        self._arrived: torch.cuda.Event | None = None
        if survival.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self._arrived.record()

    def read(self) -> dict[Request, np.ndarray]:
        """Return [K] of each request; a copy of the round before has arrived long ago."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = self._values.numpy()
        return {
            request: row[:count]
            for (request, count), row in zip(self._counts.items(), rows, strict=True)
        }


def create_policy(config: EngineConfig, most: int, about: dict[str, str]) -> Policy:
    """Build the policy that a config names.

    Args:
        config: its `adaptive` and `cost_table`.
        most: drafts of one request.
        about: model, device and dtype, for which a cost table must have been measured.

    Raises:
        ConfigError: the cost table cannot be used.
    """
    kind, value = parse_adaptive(config.adaptive, config.max_draft_len or most)
    if kind == "schedule":
        return Schedule(value)
    if kind == "threshold":
        return Threshold(value)
    if kind == "auto":
        assert config.cost_table is not None, "the config has checked it"
        return Costs(CostTable.load(Path(config.cost_table), about))
    return Policy()


def planned_survival(requests: Sequence[Request]) -> Tensor:
    """Return the survivals of the drafts that could be verified, [R, K] fp32 where they are.

    Behind a request's own there is -1.
    """
    rows, index, start = [], [], 0
    width = max(request.num_planned for request in requests)
    for request in requests:
        count = request.num_planned
        if count > 0:
            assert request.draft is not None and request.draft.survival is not None
            rows.append(torch.as_tensor(request.draft.survival[:count], dtype=torch.float32))
        index.append([*range(start, start + count), *[-1] * (width - count)])
        start += count
    flat = torch.cat([*rows, rows[0].new_full((1,), -1.0)])
    return flat[torch.tensor(index).to(flat.device)]


def share_out(requests: Sequence[Request], budget: int) -> None:
    """Split a budget over the requests' drafts by survival; set `max_drafts`."""
    counts = [request.num_planned for request in requests]
    if sum(counts) <= budget:
        return
    survival = planned_survival(requests)
    device = survival.device
    depth = torch.zeros(survival.shape, dtype=torch.int64)
    for index, (request, count) in enumerate(zip(requests, counts, strict=True)):
        if request.draft is not None:
            depth[index, :count] = torch.tensor(request.draft.depths[:count])
    # A sampled tree keeps the order of its draws, in which survival may rise again. A later row
    # must not bring in an earlier one: whether a row is verified depends on rows before it alone.
    admitted = admit(
        survival.cummin(dim=1).values,
        depth.cummax(dim=1).values.to(device),
        torch.tensor(counts).to(device),
        torch.tensor(budget).to(device),
    )
    for request, count in zip(requests, admitted.counts.tolist(), strict=True):
        request.max_drafts = count
