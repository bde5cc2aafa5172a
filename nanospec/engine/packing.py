"""From a plan and prompt chunks to the packed rows of a `ForwardBatch`.

The rows of a plan are packed on the device, where their counts live; `packing_triton` is the fast
version of `pack_rows_reference`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nanospec.attention import mask
from nanospec.attention.batch import ForwardBatch, padded_tables, slots_of
from nanospec.device import to_device
from nanospec.types import PackedRows, Request, Segment, VerifyPlan


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch, and where in it the plan is: rows `first_row` and on."""

    batch: ForwardBatch
    rows: PackedRows
    first_row: int


def pack(
    plan: VerifyPlan,
    requests: Sequence[Request],
    chunks: Sequence[Segment],
    *,
    page_size: int,
    scratch_slot: int,
    device: torch.device,
    ahead: Tensor | None = None,
) -> PackedStep:
    """Lay out chunks of prompts first, then the plan's rows; of these the logits are wanted.

    Args:
        plan: of `requests`, each of which holds pages for its rows. The root of one that also has a
            chunk in this forward comes right after that chunk.
        requests: R.
        chunks: rows that are only cached, causal.
        page_size: tokens per page.
        scratch_slot: takes the keys and values of unused rows.
        device: where the tensors go.
        ahead: [R] int64, tokens of each request that the host does not know yet, but holds pages
            for.
    """
    counts = plan.row_counts
    host_starts = [len(request.tokens) - 1 for request in requests]
    starts = to_device(host_starts, device)
    starts = starts if ahead is None else starts + ahead
    num_chunks, first_row = len(chunks), sum(chunk.num_rows for chunk in chunks)
    segments = [chunk.request for chunk in chunks] + list(requests)
    tables = to_device(padded_tables([each.pages for each in segments]), device, torch.int32)
    rows = pack_rows(
        plan,
        starts,
        tables[num_chunks:],
        page_size=page_size,
        scratch_slot=scratch_slot,
    )
    chunk_rows = to_device(_chunk_rows(chunks, page_size), device)
    chunk_lens = [chunk.num_rows for chunk in chunks]
    chunk_ends = [chunk.request.kv_len + chunk.num_rows for chunk in chunks]
    words = None
    if plan.num_masked > 0:
        words = torch.cat((torch.zeros_like(chunk_rows[0]), rows.words))
    host_lens = None
    if counts is not None and ahead is None:
        host_ends = [start + count for start, count in zip(host_starts, counts, strict=True)]
        host_lens = (chunk_lens + counts, chunk_ends + host_ends)
    starts_of_chunks = list(accumulate(chunk_lens, initial=0))[:-1]
    batch = ForwardBatch(
        token_ids=torch.cat((chunk_rows[0], rows.token_ids)),
        positions=torch.cat((chunk_rows[1], rows.positions)),
        slots=torch.cat((chunk_rows[2], rows.slots)),
        qo_indptr=torch.cat(
            (to_device(starts_of_chunks, device, torch.int32), (rows.offsets + first_row).int())
        ),
        kv_lens=torch.cat(
            (to_device(chunk_ends, device, torch.int32), (starts + plan.num_rows).int())
        ),
        page_tables=tables,
        logit_rows=torch.arange(first_row, first_row + plan.num_tokens, device=device),
        max_rows=max([*chunk_lens, plan.max_rows]),
        num_masked=plan.num_masked,
        words=words,
        host_lens=host_lens,
    )
    return PackedStep(batch, rows, first_row)


def _chunk_rows(chunks: Sequence[Segment], page_size: int) -> list[list[int]]:
    """Return token ids, positions and slots of the chunks' rows."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for chunk in chunks:
        request, start = chunk.request, chunk.request.kv_len
        span = range(start, start + chunk.num_rows)
        token_ids += request.tokens[span.start : span.stop]
        positions += span
        slots += slots_of(request.pages, span, page_size)
    return [token_ids, positions, slots]


def pack_rows(
    plan: VerifyPlan, kv_lens: Tensor, page_tables: Tensor, *, page_size: int, scratch_slot: int
) -> PackedRows:
    """Pack a plan's rows on the device.

    Row i of a request goes to the slot of its token `kv_len + i`, and stands at position
    `kv_len + depth`, unless the plan gives it another.

    Args:
        plan: R requests of at most M rows.
        kv_lens: [R] int64, tokens before each root.
        page_tables: [R, P] int32.
        page_size: tokens per page.
        scratch_slot: for unused rows.
    """
    if kv_lens.is_cuda and plan.num_reqs > 0:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.engine import packing_triton

        return packing_triton.pack_rows(
            plan, kv_lens, page_tables, page_size=page_size, scratch_slot=scratch_slot
        )
    return pack_rows_reference(
        plan, kv_lens, page_tables, page_size=page_size, scratch_slot=scratch_slot
    )


def pack_rows_reference(
    plan: VerifyPlan, kv_lens: Tensor, page_tables: Tensor, *, page_size: int, scratch_slot: int
) -> PackedRows:
    """See `pack_rows`."""
    depth, words = _depths_and_words(plan)
    if plan.visibility is not None:
        words = mask.pack_words(plan.visibility.tril())
    row = torch.arange(plan.max_rows, device=kv_lens.device)
    at = kv_lens[:, None] + row  # [R, M] the token each row's slot belongs to
    page_tables = page_tables.long()
    page = page_tables.gather(1, (at // page_size).clamp(max=page_tables.shape[1] - 1))
    offsets = torch.nn.functional.pad(plan.num_rows.cumsum(0), (1, 0))
    live = row < plan.num_rows[:, None]
    # Rows beyond a request's count all go to one place behind the end, which is cut off.
    to = torch.where(live, offsets[:-1, None] + row, plan.num_tokens).flatten()

    def packed(values: Tensor, unused: int) -> Tensor:
        out = values.new_full((plan.num_tokens + 1,), unused)
        return out.scatter_(0, to, values.flatten())[:-1]

    return PackedRows(
        token_ids=packed(plan.tokens, 0),
        positions=packed(
            kv_lens[:, None] + (depth if plan.positions is None else plan.positions), 0
        ),
        slots=packed(page * page_size + at % page_size, scratch_slot),
        words=packed(words, 0),
        request=packed(torch.arange(plan.num_reqs, device=row.device)[:, None].expand_as(at), 0),
        depth=packed(depth, 0),
        offsets=offsets,
    )


def _depths_and_words(plan: VerifyPlan) -> tuple[Tensor, Tensor]:
    """Return [R, M] int64 each: a row's distance from the root, and itself with its ancestors."""
    depth = torch.zeros_like(plan.tokens)
    words = torch.zeros_like(plan.tokens)
    one = torch.ones((), dtype=torch.int64, device=words.device)
    words[:, 0] = 1
    for row in range(1, plan.max_rows):
        parent = plan.parents[:, row : row + 1]
        has_parent = parent >= 0
        safe = parent.clamp(min=0)
        depth[:, row : row + 1] = torch.where(has_parent, depth.gather(1, safe) + 1, 0)
        above = torch.where(has_parent, words.gather(1, safe), 0)
        words[:, row : row + 1] = above | (one << row)
    return depth, words
