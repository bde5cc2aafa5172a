"""What came of a round: on its way to the host, and to the next round, which does not wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec.device import Array, HostCopy
from nanospec.types import AcceptResult, PlanKind, VerifyPlan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of R requests."""

    counts: list[int]  # rows verified, root included
    depths: list[int]  # of the deepest draft verified; rows of nobody are none
    tokens: list[list[int]]  # emitted
    path: list[list[int]]  # rows of the accepted path, the root first


class Answer:
    """What the host must read of a round; on its way from the moment it is made."""

    def __init__(self, plan: VerifyPlan, values: Tensor):
        """Start to copy what `sum_up` gives of a plan."""
        self._is_chain = plan.kind is PlanKind.CHAIN
        self._width = plan.max_rows
        self._values = HostCopy(values)

    def read(self) -> Outcome:
        """Wait until it is there; return what came of the requests."""
        values, width = self._values.read().numpy(), self._width
        tokens, path, parents = (values[:, at * width : (at + 1) * width] for at in range(3))
        counts, lengths = values[:, 3 * width :].T.tolist()
        if self._is_chain:  # what its paths and depths are is known
            paths = [list(range(length)) for length in lengths]
            depths = [count - 1 for count in counts]
        else:
            paths = _cut(path, lengths)
            depths = [max(_depths(own)) for own in _cut(parents, counts)]
        return Outcome(counts, depths, _cut(tokens, lengths), paths)


def _cut(rows: Array, lengths: Sequence[int]) -> list[list[int]]:
    """Return the first so many numbers of each row."""
    return [row[:length] for row, length in zip(rows.tolist(), lengths, strict=True)]


def _depths(parents: Sequence[int]) -> list[int]:
    """Return how deep each row of a tree is, -1 for rows of nobody and what hangs on them."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 and depths[parent] >= 0 else -1)
    return depths


def sum_up(
    plan: VerifyPlan, result: AcceptResult, ahead: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a round gives its requests, and what the host must read of it.

    Args:
        plan: what was verified.
        result: what survived.
        ahead: [R] int64, what the round before gives them, if that is in flight.

    Returns:
        Roots [R] int64; tokens [R] int64 that the host does not know of, those of the round before
        included; and [R, 3 M + 2] int64: emitted tokens, path, parents, number of rows, number of
        tokens.
    """
    if result.tokens.is_cuda and plan.num_reqs > 0:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.engine import answer_triton

        return answer_triton.sum_up(plan, result, ahead)
    return sum_up_reference(plan, result, ahead)


def sum_up_reference(
    plan: VerifyPlan, result: AcceptResult, ahead: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `sum_up`."""
    num_new = result.num_emitted
    roots = result.tokens.gather(1, num_new[:, None] - 1)[:, 0]
    counts = torch.stack((plan.num_rows, num_new), dim=1)
    values = torch.cat((result.tokens, result.path, plan.parents, counts), dim=1)
    return roots, num_new if ahead is None else ahead + num_new, values
