"""Adaptive verification: every round, which of the drafts that were made are worth verifying.

A policy speaks twice a round. `candidate_budget`, before drafts are made, says how many may be;
`admit`, once the round's rows are known, says how many of each request are verified. What keeps
that lossless: survivals decide, never token values; and how *many* drafts of all are verified never
depends on the survivals that are chosen from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanospec.config import EngineConfig, parse_adaptive
from nanospec.device import HostCopy, to_device
from nanospec.spec.budget import CostTable, admit, choose_budget, deal
from nanospec.spec.plan import common_origin, rows_in
from nanospec.types import Budget, EngineView, Request

PROBE_ROUNDS = 32  # while nothing is drafted, try again after so many
MOST_PROBE_ROUNDS = 256  # each try in vain doubles the wait for the next, up to this
PROBE_REQUESTS = 16  # that are drafted for then
DOUBTS = 16  # requests, of rounds in a row, whose drafts must promise too little to stop drafting


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which drafts a round verifies: leading ones of each request."""

    counts: Tensor | None = None  # [R] int64, on the device; None: `max_drafts` of the requests
    total: int = 0  # the sum of `counts`
    predicted_us: float | None = None  # what the round should take, where that is known


class Policy:
    """Verifies every draft that was made and has a row: `adaptive=off`."""

    needs_survival = False  # whether drafts must say how probably they survive

    def candidate_budget(self, view: EngineView, most: int) -> Budget:
        """Return how many drafts may be made for the next round, `most` of a request."""
        return Budget(view.num_running * most, 1 + most)

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """Choose what this round verifies.

        Args:
            requests: R, those that sample. `max_drafts` says what there are pages for, and may be
                lowered.
            num_other_rows: rows of the forward that are no drafts.
            room: drafts that the forward can hold beside them.
        """
        del num_other_rows
        deal_out(requests, room)
        return Verdict()


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

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """See `Policy.admit`."""
        del num_other_rows
        drafting = sum(request.num_planned > 0 for request in requests)
        return share_out(requests, min(drafting * self._mean(len(requests)), room))

    def _mean(self, num_requests: int) -> int:
        means = (mean for first, last, mean in self._rows if first <= num_requests <= last)
        return next(means, 0)


class Threshold(Policy):
    """Verifies a request's drafts while their survival is no less than a bound.

    Synchronises where survivals are on a GPU: how many rows that makes, the host must know.
    """

    needs_survival = True

    def __init__(self, bound: float):
        self._bound = bound

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """See `Policy.admit`."""
        del num_other_rows
        if any(request.num_planned > 0 for request in requests):
            enough = planned_survival(requests) >= self._bound
            counts = enough.long().cumprod(dim=1).sum(dim=1)
            for request, count in zip(requests, counts.tolist(), strict=True):
                request.max_drafts = min(count, request.num_planned)
        return share_out(requests, room)


class Costs(Policy):
    """As many drafts as give most tokens per second by a cost table: `adaptive=auto`.

    The budget is chosen from survivals of an earlier round; a request without any counts as sure
    of its drafts. Where none pays, no more are made; of few requests not at once, as a place in a
    text that is hard to guess is no reason. As without drafts there would be no new survivals, and
    0 for ever, there is a probe after `PROBE_ROUNDS` rounds, after twice as many each time it was
    in vain, and when a tenth fewer requests run than when drafting stopped: drafts are made, for
    some requests where a drafter knows survivals itself, until what they promise is known, and
    stands for all. Where survivals are learnt from outcomes, a probe verifies one draft of each
    request.
    """

    needs_survival = True

    def __init__(self, table: CostTable, *, learns: bool = False):
        self._table = table
        self._learns = learns  # whether survivals are learnt from what is verified
        self._known: dict[Request, np.ndarray] = {}  # survivals of an earlier round
        self._copy: _Promised | None = None  # those of the last round, on their way here
        self._rounds_off: int | None = None  # rounds since drafting stopped; None: it goes on
        self._wait = PROBE_ROUNDS  # so many of them, then a probe
        self._running_then: int | None = None
        self._is_probe = False  # whether drafts are made to find out whether they pay
        self._doubts = 0  # drafts of rounds in a row which promised too little

    @property
    def _drafts_for_some(self) -> bool:
        return self._is_probe and not self._learns

    def candidate_budget(self, view: EngineView, most: int) -> Budget:
        """See `Policy.candidate_budget`."""
        if self._rounds_off is not None:
            self._rounds_off += 1
            if self._running_then is None:
                self._running_then = view.num_running
            fewer = self._running_then - view.num_running
            # Where others wait, they take the places of those that ended.
            is_news = view.num_waiting == 0 and fewer >= max(self._running_then // 10, 1)
            if not is_news and self._rounds_off < self._wait:
                return Budget(0, 1)
            self._rounds_off, self._is_probe = None, True
        if self._drafts_for_some:
            return Budget(PROBE_REQUESTS * most, 1 + most, max_requests=PROBE_REQUESTS)
        return Budget(view.num_running * most, 1 + most)

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """See `Policy.admit`."""
        drafting = [request for request in requests if request.num_planned > 0]
        if not drafting:
            return self._verdict(requests, num_other_rows, share_out(requests, 0), 0)
        if self._copy is not None:
            self._known |= self._copy.read()
        survival = planned_survival(requests)
        self._copy = _Promised(requests, survival)
        # A probe ends when it knows what some of its drafts promise, and by these alone.
        told = [each for each in drafting if each in self._known] if self._is_probe else drafting
        budget = min(self._choose(drafting, len(requests), num_other_rows), room)
        if not told and self._learns and budget < len(drafting):
            deal_out(requests, min(len(drafting), room))
            budget = sum(request.num_planned for request in requests)
        # No passing prompt stops drafting, and no minority that happens to have drafts.
        is_zero = budget == 0 and 2 * len(drafting) >= len(requests)
        was_probe, self._is_probe = self._is_probe, self._is_probe and not told
        if told and (was_probe or is_zero) and self._never_pays(told, len(requests)):
            self._doubts += len(told)
            # Nothing known of any: they count as sure of their drafts, and even such do not pay.
            is_settled = was_probe or self._learns or self._known.keys().isdisjoint(told)
            if is_settled or self._doubts >= DOUBTS:
                # By the next probe what they promise will be another thing.
                self._known, self._copy = {}, None
                self._wait = min(2 * self._wait, MOST_PROBE_ROUNDS) if was_probe else PROBE_ROUNDS
                self._rounds_off, self._running_then, self._doubts = 0, None, 0
        elif told:
            self._doubts = 0
        self._known = {each: own for each, own in self._known.items() if not each.is_finished}
        return self._verdict(
            requests, num_other_rows, share_out(requests, budget, survival), budget
        )

    def _choose(self, drafting: Sequence[Request], num_requests: int, num_other_rows: int) -> int:
        return choose_budget(
            np.concatenate([self._expected(request) for request in drafting]),
            self._table,
            num_requests=num_requests,
            num_other_rows=num_other_rows,
        )

    def _never_pays(self, drafting: Sequence[Request], num_requests: int) -> bool:
        """Whether no draft would pay, if all requests had drafts that promise as much as these."""
        everyone = [drafting[index % len(drafting)] for index in range(num_requests)]
        return self._choose(everyone, num_requests, num_requests) == 0

    def _verdict(
        self, requests: Sequence[Request], num_other_rows: int, verdict: Verdict, budget: int
    ) -> Verdict:
        """Add what the round should take: its rows and, unless drafting has stopped, its drafts."""
        cost = float(self._table.verify_us(np.array([num_other_rows + budget]))[0])
        if self._rounds_off is None:
            drafting = max(len(requests), 1)
            if self._drafts_for_some:
                drafting = min(drafting, PROBE_REQUESTS)
            cost += self._table.draft_us(drafting)
        return Verdict(verdict.counts, verdict.total, cost)

    def _expected(self, request: Request) -> np.ndarray:
        """Return survivals of an earlier round, [K], for as many drafts as there are now."""
        count = request.num_planned
        earlier = self._known.get(request)
        if earlier is None:
            return np.ones(count)
        return np.pad(earlier[:count], (0, max(count - len(earlier), 0)), mode="edge")


class _Promised:
    """Survivals on their way to the host, to be read a round later."""

    def __init__(self, requests: Sequence[Request], survival: Tensor):
        self._counts = [(request, request.num_planned) for request in requests]
        self._values = HostCopy(survival)

    def read(self) -> dict[Request, np.ndarray]:
        """Return [K] of each request."""
        rows = self._values.read().numpy()
        return {
            request: row[:count]
            for (request, count), row in zip(self._counts, rows, strict=True)
            if count > 0
        }


def create_policy(
    config: EngineConfig, most: int, about: dict[str, str], *, learns: bool = False
) -> Policy:
    """Build the policy that a config names.

    Args:
        config: its `adaptive` and `cost_table`.
        most: drafts of one request.
        about: model, device and dtype, for which a cost table must have been measured.
        learns: whether survivals are learnt from what is verified.

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
        return Costs(CostTable.load(Path(config.cost_table), about), learns=learns)
    return Policy()


def planned_survival(requests: Sequence[Request]) -> Tensor:
    """Return the survivals of the drafts that could be verified, [R, K] fp32 where they are.

    Behind a request's own there is anything.

    Args:
        requests: R, one of which at least has a draft.
    """
    origin = common_origin(requests)
    if origin is not None and origin.survival is not None:
        index = rows_in(origin, requests)
        return origin.survival if index is None else origin.survival[index]
    width = max(request.num_planned for request in requests)
    survival = torch.zeros(len(requests), width)
    for own, request in zip(survival, requests, strict=True):
        count = request.num_planned
        if count > 0:
            assert request.draft is not None and request.draft.survival is not None
            own[:count] = torch.as_tensor(request.draft.survival[:count])
    return survival


def share_out(requests: Sequence[Request], budget: int, survival: Tensor | None = None) -> Verdict:
    """Split a budget over the requests' drafts by survival.

    Where the drafts lie on a device, so do the counts. Else `max_drafts` are lowered.

    Args:
        requests: R.
        budget: drafts of all requests, at most.
        survival: [R, K] of `planned_survival`, if the caller has it.
    """
    counts = [request.num_planned for request in requests]
    if sum(counts) <= budget:
        return Verdict()
    survival = planned_survival(requests) if survival is None else survival
    depth = _depths(requests, survival)
    # A sampled tree keeps the order of its draws, in which survival may rise again. A later row
    # must not bring in an earlier one: whether a row is verified depends on rows before it alone.
    admitted = admit(
        survival.cummin(dim=1).values,
        depth,
        to_device(counts, survival.device),
        to_device(budget, survival.device),
    )
    origin = common_origin(requests)
    if origin is not None and origin.survival is not None:
        return Verdict(admitted.counts, budget)
    for request, count in zip(requests, admitted.counts.tolist(), strict=True):
        request.max_drafts = count
    return Verdict()


def _depths(requests: Sequence[Request], survival: Tensor) -> Tensor:
    """Return the depth of each draft, [R, K] int64, never falling along a draft."""
    count, width = survival.shape
    depth = torch.arange(1, width + 1, device=survival.device).expand(count, -1).contiguous()
    if all(request.draft is None or request.draft.parents is None for request in requests):
        return depth
    for own, request in zip(depth, requests, strict=True):
        if request.draft is not None:
            found = request.draft.depths[: request.num_planned]
            own[: len(found)] = torch.tensor(found).cummax(dim=0).values
    return depth


def deal_out(requests: Sequence[Request], room: int) -> None:
    """Lower `max_drafts` so that no more than `room` drafts are left, one each at a time."""
    if sum(request.max_drafts for request in requests) <= room:
        return  # nobody plans more than that
    planned = [request.num_planned for request in requests]
    if sum(planned) > room:
        for request, share in zip(requests, deal(planned, room), strict=True):
            request.max_drafts = share
