"""What came of a round: on its way to the host, and to the next round, which does not wait."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec.device import HostCopy
from nanospec.types import AcceptResult, Pending, VerifyPlan


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """What came of one request."""

    tokens: list[int]  # emitted
    path: list[int]  # rows of the accepted path, the root first
    parents: list[int]  # of its rows
    num_rows: int  # verified, root included


class Answer:
    """What the host must read of a round; on its way from the moment it is made."""

    def __init__(self, plan: VerifyPlan, values: Tensor):
        """Start to copy what `sum_up` gives of a plan."""
        self._width = plan.max_rows
        self._values = HostCopy(values)

    def read(self) -> list[RequestAnswer]:
        """Wait until it is there; return what came of each request."""
        width, found = self._width, []
        for *values, num_rows, num_emitted in self._values.read().tolist():
            tokens, path = values[:num_emitted], values[width : width + num_emitted]
            found.append(RequestAnswer(tokens, path, values[2 * width :], num_rows))
        return found


def sum_up(plan: VerifyPlan, result: AcceptResult, ahead: Tensor | None) -> tuple[Pending, Tensor]:
    """Return what a round gives its requests, and what the host must read of it.

    Args:
        plan: what was verified.
        result: what survived.
        ahead: [R] int64, what the round before gives them, if that is in flight.

    Returns:
        Roots, and tokens that the host does not know of, those of the round before included; and
        [R, 3 M + 2] int64: emitted tokens, path, parents, number of rows, number of tokens.
    """
    if result.tokens.is_cuda and plan.num_reqs > 0:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.engine import answer_triton

        return answer_triton.sum_up(plan, result, ahead)
    return sum_up_reference(plan, result, ahead)


def sum_up_reference(
    plan: VerifyPlan, result: AcceptResult, ahead: Tensor | None
) -> tuple[Pending, Tensor]:
    """See `sum_up`."""
    num_new = result.num_emitted
    roots = result.tokens.gather(1, num_new[:, None] - 1)[:, 0]
    counts = torch.stack((plan.num_rows, num_new), dim=1)
    values = torch.cat((result.tokens, result.path, plan.parents, counts), dim=1)
    return Pending(roots, num_new if ahead is None else ahead + num_new), values
