"""The Triton version of `budget.admit_reference`: one launch, no host synchronisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kth(keys, there, count, STEPS: tl.constexpr):
    # The count-th largest of the keys that are there, two bits at a time from the top; also how
    # many of the keys equal to it are among those largest. Per step the keys that agree so far are
    # counted by their next two bits, three counts in one sum, 21 bits each.
    found = tl.zeros((), tl.int64)
    left = count
    for step in tl.static_range(STEPS):
        shift = 2 * (STEPS - 1 - step)
        agrees = there & ((keys >> (shift + 2)) == (found >> (shift + 2)))
        digit = (keys >> shift) & 3
        one = tl.where(digit == 3, 1, tl.where(digit == 2, 1 << 21, 1 << 42)).to(tl.int64)
        counts = tl.sum(tl.where(agrees & (digit > 0), one, 0))
        threes = counts & 0x1FFFFF
        twos = threes + ((counts >> 21) & 0x1FFFFF)
        ones = twos + (counts >> 42)
        chosen = tl.where(
            left <= threes, 3, tl.where(left <= twos, 2, tl.where(left <= ones, 1, 0))
        )
        above = tl.where(chosen == 3, 0, tl.where(chosen == 2, threes, twos))
        left -= tl.where(chosen == 0, ones, above)
        found |= chosen.to(tl.int64) << shift
    return found, left


# Numbers that change from round to round are not specialised on: no round waits for a compiler.
@triton.jit(
    do_not_specialize=["num_reqs", "width", "num_chunk_rows"],
    do_not_specialize_on_alignment=["survival_ptr", "depth_ptr", "num_drafts_ptr", "budget_ptr"],
)
def _admit_kernel(
    survival_ptr,
    depth_ptr,
    num_drafts_ptr,
    budget_ptr,
    counts_ptr,
    logit_offsets_ptr,
    row_offsets_ptr,
    num_reqs,
    width,
    num_chunk_rows,
    REQS: tl.constexpr,
    ROWS: tl.constexpr,
    TIE_STEPS: tl.constexpr,
):
    # One program: thousands of drafts fit its registers, and programs would have to wait for each
    # other. Bits of a float that is not negative rise with its value.
    request = tl.arange(0, REQS)
    row = tl.arange(0, ROWS)
    num_drafts = tl.load(num_drafts_ptr + request, mask=request < num_reqs, other=0)
    there = (row[None, :] < num_drafts[:, None]) & (row[None, :] < width)
    at = request[:, None] * width + row[None, :]
    survival = tl.load(survival_ptr + at, mask=there, other=0.0)
    keys = survival.to(tl.int32, bitcast=True).to(tl.int64)
    total = tl.sum(tl.minimum(num_drafts, width))
    budget = tl.minimum(tl.maximum(tl.load(budget_ptr), 0), total)
    least, ties = _kth(keys, there, budget, 16)
    is_tied = there & (keys == least)
    admitted = there & (keys > least)
    num_tied = tl.sum(is_tied.to(tl.int64))
    if ties < num_tied:  # the shallow ones of equal survival, then by request and place
        depth = tl.load(depth_ptr + at, mask=there, other=0)
        order = (1 << (2 * TIE_STEPS)) - 1 - (depth * (REQS * ROWS) + request[:, None] * ROWS + row)
        last, _ = _kth(order, is_tied, ties, TIE_STEPS)
        is_tied = is_tied & (order >= last)
    admitted = (admitted | is_tied) & (budget > 0)
    counts = tl.sum(admitted.to(tl.int64), axis=1)
    ends = tl.cumsum(tl.where(request < num_reqs, counts + 1, 0), axis=0)
    live = request < num_reqs
    tl.store(counts_ptr + request, counts, mask=live)
    tl.store(logit_offsets_ptr, 0)
    tl.store(row_offsets_ptr, num_chunk_rows)
    tl.store(logit_offsets_ptr + 1 + request, ends, mask=live)
    tl.store(row_offsets_ptr + 1 + request, ends + num_chunk_rows, mask=live)


def admit(
    survival: Tensor, depth: Tensor, num_drafts: Tensor, budget: Tensor, num_chunk_rows: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `budget.admit`; returns the fields of an `Admission` in their order."""
    num_reqs, width = survival.shape
    assert survival.is_contiguous() and depth.is_contiguous(), "rows must follow each other"
    # One kernel serves all rounds of an engine: its bounds are wider than most of them need.
    reqs = max(256, triton.next_power_of_2(num_reqs))
    rows = max(8, triton.next_power_of_2(width))
    counts = torch.empty(num_reqs, dtype=torch.int64, device=survival.device)
    logit_offsets, row_offsets = counts.new_empty(num_reqs + 1), counts.new_empty(num_reqs + 1)
    tie_bits = 7 + (reqs * rows - 1).bit_length()  # depths below 128, then request and place
    _admit_kernel[(1,)](
        survival,
        depth,
        num_drafts,
        budget,
        counts,
        logit_offsets,
        row_offsets,
        num_reqs,
        width,
        num_chunk_rows,
        REQS=reqs,
        ROWS=rows,
        TIE_STEPS=(tie_bits + 1) // 2,
        num_warps=min(reqs * rows // 256, 16),
    )
    return counts, logit_offsets, row_offsets
