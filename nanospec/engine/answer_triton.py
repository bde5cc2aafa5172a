"""The Triton version of `answer.sum_up_reference`: one launch."""

import triton
import triton.language as tl
from torch import Tensor

from nanospec.types import AcceptResult, VerifyPlan

_POINTERS = [
    f"{name}_ptr"
    for name in (
        *("tokens", "path", "parents", "num_rows", "num_emitted", "ahead"),
        *("roots", "totals", "values"),
    )
]


# Numbers that change from round to round are not specialised on: no round waits for a compiler.
@triton.jit(do_not_specialize=["max_rows", "num_ahead"], do_not_specialize_on_alignment=_POINTERS)
def _sum_up_kernel(
    tokens_ptr,
    path_ptr,
    parents_ptr,
    num_rows_ptr,
    num_emitted_ptr,
    ahead_ptr,
    roots_ptr,
    totals_ptr,
    values_ptr,
    max_rows,
    num_ahead,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    num_emitted = tl.load(num_emitted_ptr + request)
    num_rows = tl.load(num_rows_ptr + request)
    ahead = tl.load(ahead_ptr + request, mask=request < num_ahead, other=0)
    tl.store(totals_ptr + request, ahead + num_emitted)
    row = tl.arange(0, ROWS)
    own = request * max_rows + row
    live = row < max_rows
    tokens = tl.load(tokens_ptr + own, mask=live, other=0)
    tl.store(roots_ptr + request, tl.sum(tl.where(row == num_emitted - 1, tokens, 0)))
    to = values_ptr + request * (3 * max_rows + 2) + row
    tl.store(to, tokens, mask=live)
    tl.store(to + max_rows, tl.load(path_ptr + own, mask=live), mask=live)
    tl.store(to + 2 * max_rows, tl.load(parents_ptr + own, mask=live), mask=live)
    end = values_ptr + (request + 1) * (3 * max_rows + 2)
    tl.store(end - 2, num_rows)
    tl.store(end - 1, num_emitted)


def sum_up(
    plan: VerifyPlan, result: AcceptResult, ahead: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `answer.sum_up`."""
    num_reqs, max_rows = plan.tokens.shape
    roots, totals = plan.num_rows.new_empty(2, num_reqs).unbind()
    values = plan.num_rows.new_empty(num_reqs, 3 * max_rows + 2)
    _sum_up_kernel[(num_reqs,)](
        result.tokens,
        result.path,
        plan.parents,
        plan.num_rows,
        result.num_emitted,
        result.num_emitted if ahead is None else ahead,
        roots,
        totals,
        values,
        max_rows,
        0 if ahead is None else num_reqs,
        ROWS=triton.next_power_of_2(max_rows),
    )
    return roots, totals, values
