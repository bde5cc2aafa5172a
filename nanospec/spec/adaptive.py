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

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> None:
        """Lower `max_drafts` of requests to what this round verifies.

        Args:
            requests: R, those that sample. `max_drafts` says what there are pages and rows for.
            num_other_rows: rows of the forward that are no drafts.
        """


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

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> None:
        """See `Policy.admit`."""
        del num_other_rows
        drafting = sum(request.num_planned > 0 for request in requests)
        share_out(requests, drafting * self._mean(len(requests)))

    def _mean(self, num_requests: int) -> int:
        means = (mean for first, last, mean in self._rows if first <= num_requests <= last)
        return next(means, 0)


class Threshold(Policy):
    """Verifies a request's drafts while their survival is no less than a bound."""

    needs_survival = True

    def __init__(self, bound: float):
        self._bound = bound

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> None:
        """See `Policy.admit`."""
        del num_other_rows
        for request in requests:
            own = survival_of(request)
            short = (count for count, alive in enumerate(own) if alive < self._bound)
            request.max_drafts = next(short, len(own))


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
        self._earlier: dict[Request, list[float]] = {}
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

    def admit(self, requests: Sequence[Request], num_other_rows: int) -> None:
        """See `Policy.admit`."""
        drafting = [request for request in requests if request.num_planned > 0]
        if not drafting:
            return
        known = [alive for request in drafting for alive in self._known(request)]
        budget = choose_budget(
            np.array(known),
            self._table,
            num_requests=len(requests),
            num_other_rows=num_other_rows,
        )
        if self._is_probe:  # decided before this round's drafts were made
            budget = max(budget, len(drafting))
            self._is_probe = False
        elif budget == 0:
            self._rounds_off, self._running_then = 0, None
        current = {request: survival_of(request) for request in drafting}
        share_out(requests, budget)
        kept = {each: own for each, own in self._earlier.items() if not each.is_finished}
        self._earlier = kept | current

    def _known(self, request: Request) -> list[float]:
        """Return survivals of an earlier round for as many drafts as there are now."""
        earlier = self._earlier.get(request, [1.0] * request.num_planned)
        last = earlier[-1] if earlier else 1.0
        missing = request.num_planned - len(earlier)
        return earlier[: request.num_planned] + [last] * missing


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


def survival_of(request: Request) -> list[float]:
    """Return the survivals of the drafts that could be verified."""
    if request.num_planned == 0:
        return []
    assert request.draft is not None and request.draft.survival is not None
    return list(request.draft.survival[: request.num_planned])


def share_out(requests: Sequence[Request], budget: int) -> None:
    """Split a budget over the requests' drafts by survival; set `max_drafts`."""
    counts = [request.num_planned for request in requests]
    width = max(counts, default=0)
    if sum(counts) <= budget:
        return
    survival = torch.zeros(len(requests), width)
    depth = torch.zeros(len(requests), width, dtype=torch.int64)
    for index, request in enumerate(requests):
        if request.draft is not None and counts[index] > 0:
            survival[index, : counts[index]] = torch.tensor(survival_of(request))
            depth[index, : counts[index]] = torch.tensor(request.draft.depths[: counts[index]])
    # A sampled tree keeps the order of its draws, in which survival may rise again. A later row
    # must not bring in an earlier one: whether a row is verified depends on rows before it alone.
    survival, depth = survival.cummin(dim=1).values, depth.cummax(dim=1).values
    admitted = admit(survival, depth, torch.tensor(counts), budget)
    for request, count in zip(requests, admitted.tolist(), strict=True):
        request.max_drafts = count
