"""The Triton version of `packing.pack_reference`, padding included: one launch, no host waits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec.attention.batch import ForwardBatch
from nanospec.engine.packing import Segments
from nanospec.types import PackedRows, VerifyPlan

_LANES = 128  # rows, pages or requests that a program takes at once

_POINTERS = [
    f"{name}_ptr"
    for name in (
        *("tokens", "parents", "num_rows", "positions", "visibility"),
        *("starts", "tables", "chunk_starts", "chunk_tokens", "ahead"),
        *("token_ids", "row_positions", "slots", "words", "indptr", "kv_lens", "to_tables"),
        *("logit_rows", "plan_tokens", "plan_slots", "plan_request", "plan_depth", "plan_offsets"),
    )
]
_SIZES = ["num_chunks", "num_reqs", "num_segments", "max_rows", "table_width", "to_width"]
_SIZES += ["first_row", "num_plan_rows", "total_rows", "scratch_slot"]
_SIZES += ["num_ahead", "num_words", "is_masked"]


# Numbers that change from round to round are not specialised on, nor is where a slice of a buffer
# starts: no round waits for a compiler.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _pack_kernel(
    tokens_ptr,
    parents_ptr,
    num_rows_ptr,
    positions_ptr,
    visibility_ptr,
    starts_ptr,
    tables_ptr,
    chunk_starts_ptr,
    chunk_tokens_ptr,
    ahead_ptr,
    token_ids_ptr,
    row_positions_ptr,
    slots_ptr,
    words_ptr,
    indptr_ptr,
    kv_lens_ptr,
    to_tables_ptr,
    logit_rows_ptr,
    plan_tokens_ptr,
    plan_slots_ptr,
    plan_request_ptr,
    plan_depth_ptr,
    plan_offsets_ptr,
    num_chunks,
    num_reqs,
    num_segments,
    max_rows,
    table_width,
    to_width,
    first_row,
    num_plan_rows,
    total_rows,
    scratch_slot,
    num_ahead,
    num_words,
    is_masked,
    page_size,
    IS_MASK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    # One program per chunk, then one per request, then one for all padding.
    segment = tl.program_id(0)
    request = segment - num_chunks
    lanes = tl.arange(0, LANES)
    if request < num_reqs:
        for first in range(0, table_width, LANES):
            column = first + lanes
            page = tl.load(tables_ptr + segment * table_width + column, mask=column < table_width)
            to = to_tables_ptr + segment.to(tl.int64) * to_width + column
            tl.store(to, page, mask=column < table_width)
    if request < 0:
        start_row = tl.load(chunk_starts_ptr + segment)
        count = tl.load(chunk_starts_ptr + segment + 1) - start_row
        start = tl.load(starts_ptr + segment)
        tl.store(indptr_ptr + segment, start_row.to(tl.int32))
        tl.store(kv_lens_ptr + segment, (start + count).to(tl.int32))
        for first in range(0, count, LANES):
            row = first + lanes
            live = row < count
            at = start + row
            page = tl.load(tables_ptr + segment * table_width + at // page_size, mask=live, other=0)
            slot = page.to(tl.int64) * page_size + at % page_size
            to = start_row + row
            tl.store(token_ids_ptr + to, tl.load(chunk_tokens_ptr + to, mask=live), mask=live)
            tl.store(row_positions_ptr + to, at, mask=live)
            tl.store(slots_ptr + to, slot, mask=live)
            tl.store(words_ptr + to, tl.zeros((LANES,), tl.int64), mask=live & (to < num_words))
        return

    # Where the request's rows start; for the program of the padding, where all rows end.
    start_row = tl.zeros((), tl.int64)
    for first in range(0, request, LANES):
        others = first + lanes
        start_row += tl.sum(tl.load(num_rows_ptr + others, mask=others < request, other=0))
    tl.store(plan_offsets_ptr + request, start_row)
    if request < num_reqs:
        # Each lane is a row and walks up to the root by itself, reading only the plan, so no lane
        # waits for another.
        count = tl.load(num_rows_ptr + request)
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
        word *= is_masked

        kv_len = tl.load(starts_ptr + segment)
        kv_len += tl.load(ahead_ptr + request, mask=request < num_ahead, other=0)
        tl.store(indptr_ptr + segment, (first_row + start_row).to(tl.int32))
        tl.store(kv_lens_ptr + segment, (kv_len + count).to(tl.int32))
        token_at = kv_len + row
        table = tables_ptr + segment * table_width
        page = tl.load(table + token_at // page_size, mask=live, other=0)
        slot = page.to(tl.int64) * page_size + token_at % page_size
        token = tl.load(tokens_ptr + at, mask=live)
        to = start_row + row
        tl.store(plan_tokens_ptr + to, token, mask=live)
        tl.store(plan_slots_ptr + to, slot, mask=live)
        tl.store(plan_request_ptr + to, request + tl.zeros((ROWS,), tl.int64), mask=live)
        tl.store(plan_depth_ptr + to, depth, mask=live)
        to += first_row
        tl.store(token_ids_ptr + to, token, mask=live)
        tl.store(row_positions_ptr + to, kv_len + offset, mask=live)
        tl.store(slots_ptr + to, slot, mask=live)
        tl.store(words_ptr + to, word, mask=live & (to < num_words))
        return

    zeros = tl.zeros((LANES,), tl.int64)
    for first in range(0, num_plan_rows, LANES):
        row = first + lanes
        tl.store(logit_rows_ptr + row, (first_row + row).to(tl.int64), mask=row < num_plan_rows)
        unused = (row >= start_row) & (row < num_plan_rows)
        tl.store(plan_tokens_ptr + row, zeros, mask=unused)
        tl.store(plan_slots_ptr + row, zeros + scratch_slot, mask=unused)
        tl.store(plan_request_ptr + row, zeros, mask=unused)
        tl.store(plan_depth_ptr + row, zeros, mask=unused)
    end = first_row + start_row
    for first in range(end, total_rows, LANES):
        row = first + lanes
        unused = row < total_rows
        tl.store(token_ids_ptr + row, zeros, mask=unused)
        tl.store(row_positions_ptr + row, zeros, mask=unused)
        tl.store(slots_ptr + row, zeros + scratch_slot, mask=unused)
        tl.store(words_ptr + row, zeros, mask=unused & (row < num_words))
    for first in range(segment, num_segments + 1, LANES):
        empty = first + lanes
        tl.store(indptr_ptr + empty, (zeros + end).to(tl.int32), mask=empty <= num_segments)
        tl.store(kv_lens_ptr + empty, zeros.to(tl.int32), mask=empty < num_segments)


def pack(
    plan: VerifyPlan,
    segments: Segments,
    ahead: Tensor | None,
    buffers: ForwardBatch | None,
    *,
    page_size: int,
    scratch_slot: int,
) -> tuple[ForwardBatch, PackedRows]:
    """See `packing.pack_reference`, and `packing.pack` for the buffers."""
    num_segments, width = segments.tables.shape
    batch = _new_batch(plan, segments) if buffers is None else buffers
    assert batch.page_tables.shape[1] >= width, "more pages than a request may have"
    assert batch.num_reqs >= num_segments, "more segments than the buffers have"
    assert batch.num_tokens >= len(segments.chunk_tokens) + plan.num_tokens, "more rows than that"
    assert len(batch.logit_rows) == plan.num_tokens, "logits of all rows of the plan are wanted"
    device, num_reqs = segments.starts.device, plan.num_reqs
    columns = torch.empty((4, plan.num_tokens), dtype=torch.int64, device=device)
    offsets = torch.empty(num_reqs + 1, dtype=torch.int64, device=device)
    token_ids, slots, request, depth = columns.unbind()
    rows = PackedRows(token_ids, slots, request, depth, offsets)
    is_mask = plan.positions is not None
    _pack_kernel[(num_segments + 1,)](
        plan.tokens,
        plan.parents,
        plan.num_rows,
        plan.positions if is_mask else plan.tokens,
        plan.visibility if is_mask else plan.tokens,
        segments.starts,
        segments.tables,
        segments.chunk_starts,
        segments.chunk_tokens,
        plan.num_rows if ahead is None else ahead,
        batch.token_ids,
        batch.positions,
        batch.slots,
        batch.slots if batch.words is None else batch.words,
        batch.qo_indptr,
        batch.kv_lens,
        batch.page_tables,
        batch.logit_rows,
        token_ids,
        slots,
        request,
        depth,
        offsets,
        segments.num_chunks,
        num_reqs,
        batch.num_reqs,
        plan.max_rows,
        width,
        batch.page_tables.stride(0),
        len(segments.chunk_tokens),
        plan.num_tokens,
        batch.num_tokens,
        scratch_slot,
        0 if ahead is None else num_reqs,
        0 if batch.words is None else batch.num_tokens,
        int(plan.num_masked > 0),
        page_size,
        IS_MASK=is_mask,
        LANES=_LANES,
        ROWS=max(8, triton.next_power_of_2(plan.max_rows)),
    )
    return batch, rows


def _new_batch(plan: VerifyPlan, segments: Segments) -> ForwardBatch:
    """Return a batch of S segments that fits, to be filled; its page tables are right already."""
    num_segments, num_rows = len(segments.starts), len(segments.chunk_tokens) + plan.num_tokens
    columns = segments.starts.new_empty(4, num_rows)
    token_ids, positions, slots, words = columns.unbind()
    lens = segments.tables.new_empty(2 * num_segments + 1)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        qo_indptr=lens[: num_segments + 1],
        kv_lens=lens[num_segments + 1 :],
        page_tables=segments.tables,
        logit_rows=segments.starts.new_empty(plan.num_tokens),
        max_rows=plan.max_rows,
        num_masked=plan.num_masked,
        words=words if plan.num_masked > 0 else None,
    )
