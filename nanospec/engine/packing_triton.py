"""The Triton version of `packing.pack_rows_reference`: one launch, no host synchronisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec.types import PackedRows, VerifyPlan


# Numbers that change from round to round are not specialised on, nor is where a slice of a buffer
# starts: no round waits for a compiler.
@triton.jit(
    do_not_specialize=["num_reqs", "max_rows", "num_pages", "num_tokens"],
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "parents_ptr",
        "num_rows_ptr",
        "positions_ptr",
        "visibility_ptr",
        "kv_lens_ptr",
        "tables_ptr",
        "out_ptr",
        "offsets_ptr",
    ],
)
def _pack_kernel(
    tokens_ptr,
    parents_ptr,
    num_rows_ptr,
    positions_ptr,
    visibility_ptr,
    kv_lens_ptr,
    tables_ptr,
    out_ptr,
    offsets_ptr,
    num_reqs,
    max_rows,
    num_pages,
    page_size,
    num_tokens,
    IS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One program per request. Each lane is a row and walks up to the root by itself, reading only
    # the plan, so no lane waits for another.
    request = tl.program_id(0)
    start = tl.zeros((), tl.int64)
    for first in range(0, request, LANES):
        others = first + tl.arange(0, LANES)
        start += tl.sum(tl.load(num_rows_ptr + others, mask=others < request, other=0))
    count = tl.load(num_rows_ptr + request)
    tl.store(offsets_ptr + request, start)
    if request == num_reqs - 1:
        tl.store(offsets_ptr + num_reqs, start + count)

    row = tl.arange(0, ROWS).to(tl.int64)
    live = row < count
    at = request * max_rows + row
    word = tl.full((ROWS,), 1, tl.int64) << row
    depth = tl.zeros((ROWS,), tl.int64)
    above = tl.load(parents_ptr + at, mask=live, other=-1)
    for _ in range(0, count - 1):
        going = above >= 0
        depth += tl.where(going, 1, 0)
        word |= tl.where(going, tl.full((ROWS,), 1, tl.int64) << tl.maximum(above, 0), 0)
        above = tl.load(parents_ptr + request * max_rows + above, mask=going, other=-1)
    offset = depth
    if IS_MASK:
        offset = tl.load(positions_ptr + at, mask=live, other=0)
        word = tl.full((ROWS,), 1, tl.int64) << row
        for column in range(0, count):
            seen = tl.load(visibility_ptr + at * max_rows + column, mask=live, other=0)
            bit = tl.full((ROWS,), 1, tl.int64) << column
            word |= tl.where((seen != 0) & (column < row), bit, 0)

    kv_len = tl.load(kv_lens_ptr + request)
    token_at = kv_len + row
    page = tl.load(tables_ptr + request * num_pages + token_at // page_size, mask=live, other=0)
    page = page.to(tl.int64)
    to = start + row
    tl.store(out_ptr + to, tl.load(tokens_ptr + at, mask=live, other=0), mask=live)
    tl.store(out_ptr + num_tokens + to, kv_len + offset, mask=live)
    tl.store(out_ptr + 2 * num_tokens + to, page * page_size + token_at % page_size, mask=live)
    tl.store(out_ptr + 3 * num_tokens + to, word, mask=live)
    tl.store(out_ptr + 4 * num_tokens + to, request + tl.zeros((ROWS,), tl.int64), mask=live)
    tl.store(out_ptr + 5 * num_tokens + to, depth, mask=live)


def pack_rows(
    plan: VerifyPlan, kv_lens: Tensor, page_tables: Tensor, *, page_size: int, scratch_slot: int
) -> PackedRows:
    """See `packing.pack_rows`."""
    num_reqs, max_rows = plan.tokens.shape
    out = torch.zeros(6, plan.num_tokens, dtype=torch.int64, device=kv_lens.device)
    out[2].fill_(scratch_slot)
    offsets = out.new_empty(num_reqs + 1)
    is_mask = plan.positions is not None
    _pack_kernel[(num_reqs,)](
        plan.tokens,
        plan.parents,
        plan.num_rows,
        plan.positions if is_mask else plan.tokens,
        plan.visibility if is_mask else plan.tokens,
        kv_lens,
        page_tables,
        out,
        offsets,
        num_reqs,
        max_rows,
        page_tables.shape[1],
        page_size,
        plan.num_tokens,
        IS_MASK=is_mask,
        LANES=128,
        ROWS=max(8, triton.next_power_of_2(max_rows)),
    )
    token_ids, positions, slots, words, request, depth = out.unbind(0)
    return PackedRows(token_ids, positions, slots, words, request, depth, offsets)
