"""From a plan and prompt chunks to the packed rows of a `ForwardBatch`.

The rows of a plan are packed on the device, where their counts live, and so are the others beside
them; `packing_triton` is the fast version of `pack_reference`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from nanospec.attention import mask
from nanospec.attention.batch import ForwardBatch, padded_tables
from nanospec.cudagraph.buckets import fill_buffers
from nanospec.device import to_device_together
from nanospec.types import PackedRows, Request, Segment, VerifyPlan


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch, in which the plan's rows follow those of the chunks, and then perhaps padding."""

    batch: ForwardBatch
    rows: PackedRows
    num_rows: int  # without padding


@dataclass(frozen=True, slots=True)
class Segments:
    """What the host knows of the S segments of a step, on the device: C chunks, then R requests."""

    starts: Tensor  # [S] int64, positions of their first rows, but for tokens on their way
    tables: Tensor  # [S, P] int32, their pages
    chunk_starts: Tensor  # [C + 1] int64, where the rows of each chunk start, and the end
    chunk_tokens: Tensor  # [chunk_starts[-1]] int64

    @property
    def num_chunks(self) -> int:
        """C."""
        return len(self.chunk_starts) - 1


# See `ModelRunner.buffers`.
Lend = Callable[[int, int, int], ForwardBatch | None]


def pack(
    plan: VerifyPlan,
    requests: Sequence[Request],
    chunks: Sequence[Segment],
    *,
    page_size: int,
    scratch_slot: int,
    device: torch.device,
    ahead: Tensor | None = None,
    lend: Lend | None = None,
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
        lend: gives a batch to be filled, for T rows of which N logits are wanted and most are of a
            segment, whose rows and segments that are not needed become padding. Where it gives
            None, or there is none, a new one is made that fits.
    """
    chunk_lens = [chunk.num_rows for chunk in chunks]
    chunk_positions = [chunk.request.kv_len for chunk in chunks]
    tokens = [
        token
        for chunk, start in zip(chunks, chunk_positions, strict=True)
        for token in chunk.request.tokens[start : start + chunk.num_rows]
    ]
    starts = [len(request.tokens) - 1 for request in requests]
    tables = [chunk.request.pages for chunk in chunks] + [request.pages for request in requests]
    columns = (
        (chunk_positions + starts, torch.int64),
        (padded_tables(tables), torch.int32),
        ([0, *accumulate(chunk_lens)], torch.int64),
        (tokens, torch.int64),
    )
    segments = Segments(*to_device_together(columns, device))
    host_lens, counts = None, plan.row_counts
    if counts is not None and ahead is None:
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        chunk_ends = [
            start + count for start, count in zip(chunk_positions, chunk_lens, strict=True)
        ]
        host_lens = (chunk_lens + counts, chunk_ends + ends)
    num_rows = len(tokens) + plan.num_tokens
    most = max([*chunk_lens, plan.max_rows])
    buffers = None if lend is None else lend(num_rows, plan.num_tokens, most)
    batch, rows = _pack(plan, segments, ahead, page_size, scratch_slot, buffers)
    if buffers is None:
        batch = replace(batch, max_rows=most, num_masked=plan.num_masked, host_lens=host_lens)
    return PackedStep(batch, rows, num_rows)


def _pack(
    plan: VerifyPlan,
    segments: Segments,
    ahead: Tensor | None,
    page_size: int,
    scratch_slot: int,
    buffers: ForwardBatch | None,
) -> tuple[ForwardBatch, PackedRows]:
    """Pack into `buffers`, or where there are none into tensors that fit."""
    options = {"page_size": page_size, "scratch_slot": scratch_slot}
    if segments.starts.is_cuda:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.engine import packing_triton

        return packing_triton.pack(plan, segments, ahead, buffers, **options)
    batch, rows = pack_reference(plan, segments, ahead, **options)
    if buffers is None:
        return batch, rows
    fill_buffers(buffers, batch, scratch_slot)
    return buffers, rows


def pack_reference(
    plan: VerifyPlan,
    segments: Segments,
    ahead: Tensor | None,
    *,
    page_size: int,
    scratch_slot: int,
) -> tuple[ForwardBatch, PackedRows]:
    """Pack on the device what `pack` has gathered; without padding, and the bounds are the plan's.

    Row i of a request goes to the slot of its token `start + i`, and stands at position `start +
    depth`, unless the plan gives it another.
    """
    num_chunks, first_row = segments.num_chunks, len(segments.chunk_tokens)
    kv_lens = segments.starts[num_chunks:]  # tokens before each root
    kv_lens = kv_lens if ahead is None else kv_lens + ahead
    tables = segments.tables.long()
    index = torch.arange(first_row, device=kv_lens.device)
    chunk = torch.bucketize(index, segments.chunk_starts[1:], right=True)
    chunk_at = segments.starts[chunk] + index - segments.chunk_starts[chunk]
    chunk_slots = tables[chunk, chunk_at // page_size] * page_size + chunk_at % page_size

    depth, words = _depths_and_words(plan)
    if plan.visibility is not None:
        words = mask.pack_words(plan.visibility.tril())
    row = torch.arange(plan.max_rows, device=kv_lens.device)
    at = kv_lens[:, None] + row  # [R, M] the token each row's slot belongs to
    page = tables[num_chunks:].gather(1, (at // page_size).clamp(max=tables.shape[1] - 1))
    offsets = torch.nn.functional.pad(plan.num_rows.cumsum(0), (1, 0))
    live = row < plan.num_rows[:, None]
    # Rows beyond a request's count all go to one place behind the end, which is cut off.
    to = torch.where(live, offsets[:-1, None] + row, plan.num_tokens).flatten()

    def packed(values: Tensor, unused: int) -> Tensor:
        out = values.new_full((plan.num_tokens + 1,), unused)
        return out.scatter_(0, to, values.flatten())[:-1]

    positions = kv_lens[:, None] + (depth if plan.positions is None else plan.positions)
    requests = torch.arange(plan.num_reqs, device=row.device)[:, None].expand_as(at)
    rows = PackedRows(
        token_ids=packed(plan.tokens, 0),
        slots=packed(page * page_size + at % page_size, scratch_slot),
        request=packed(requests, 0),
        depth=packed(depth, 0),
        offsets=offsets,
    )
    words = torch.cat((torch.zeros_like(index), packed(words, 0)))
    chunk_ends = segments.starts[:num_chunks] + segments.chunk_starts.diff()
    batch = ForwardBatch(
        token_ids=torch.cat((segments.chunk_tokens, rows.token_ids)),
        positions=torch.cat((chunk_at, packed(positions, 0))),
        slots=torch.cat((chunk_slots, rows.slots)),
        qo_indptr=torch.cat((segments.chunk_starts[:-1], offsets + first_row)).int(),
        kv_lens=torch.cat((chunk_ends, kv_lens + plan.num_rows)).int(),
        page_tables=segments.tables,
        logit_rows=torch.arange(first_row, first_row + plan.num_tokens, device=row.device),
        max_rows=plan.max_rows,
        num_masked=plan.num_masked,
        words=words if plan.num_masked > 0 else None,
    )
    return batch, rows


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
