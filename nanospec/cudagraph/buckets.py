"""Tiers of rows that graphs are captured for, and the padding up to one: the only padding there is.

Knows batches, not graphs, so that an eager run on a CPU tests the padding.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from nanospec.attention.batch import ForwardBatch


def row_tiers(largest: int) -> list[int]:
    """Return the tiers up to a largest one, which is a tier itself.

    Every size to 8, even ones to 32, multiples of 4 to 64; then steps of 8 to 64 rows, about 6 %,
    with all multiples of 64 among them: there the tiles of a matrix product are full.
    """
    tiers = [*range(1, 9), *range(10, 33, 2), *range(36, 65, 4)]
    for block in range(64, largest, 64):
        step = max(8, min(64, 1 << (block // 16).bit_length() - 1))
        tiers += range(block + step, block + 65, step)
    return [tier for tier in tiers if tier < largest] + [largest]


def tier_of(num_rows: int, tiers: Sequence[int]) -> int | None:
    """Return the smallest tier that holds so many rows, or None if none does."""
    index = bisect_left(tiers, num_rows)
    return tiers[index] if index < len(tiers) else None


def pad_batch(batch: ForwardBatch, num_rows: int, num_reqs: int, scratch_slot: int) -> ForwardBatch:
    """Fill a batch up with rows of nobody, and with empty segments at the end.

    Args:
        batch: of at most so many rows and segments.
        num_rows: T of the result.
        num_reqs: R of the result.
        scratch_slot: takes the keys and values of the rows of nobody.
    """
    rows, reqs = num_rows - batch.num_tokens, num_reqs - batch.num_reqs
    assert rows >= 0 and reqs >= 0, "the batch is larger than its tier"
    host_lens = None
    if batch.host_lens is not None:
        qo_lens, kv_lens = batch.host_lens
        host_lens = (qo_lens + [0] * reqs, kv_lens + [0] * reqs)
    end = batch.qo_indptr[-1:].expand(reqs)
    return replace(
        batch,
        token_ids=_filled(batch.token_ids, rows, 0),
        positions=_filled(batch.positions, rows, 0),
        slots=_filled(batch.slots, rows, scratch_slot),
        qo_indptr=batch.qo_indptr if reqs == 0 else _joined(batch.qo_indptr, end),
        kv_lens=_filled(batch.kv_lens, reqs, 0),
        page_tables=F.pad(batch.page_tables, (0, 0, 0, reqs)),
        words=None if batch.words is None else _filled(batch.words, rows, 0),
        # Empty segments at the end are masked ones too, which changes nothing.
        num_masked=batch.num_masked + reqs if batch.num_masked else 0,
        host_lens=host_lens,
    )


def fill_buffers(buffers: ForwardBatch, batch: ForwardBatch, scratch_slot: int) -> None:
    """Write a batch, padded, over the tensors of another that is at least as large."""
    assert not batch.is_full, "segments of the target are causal or masked"
    assert batch.words is None or buffers.words is not None, "no masks were expected"
    padded = pad_batch(batch, buffers.num_tokens, buffers.num_reqs, scratch_slot)
    for name in ("token_ids", "positions", "slots", "qo_indptr", "kv_lens", "logit_rows"):
        getattr(buffers, name).copy_(getattr(padded, name))
    buffers.page_tables[:, : padded.page_tables.shape[1]].copy_(padded.page_tables)
    if buffers.words is not None:
        buffers.words.zero_() if padded.words is None else buffers.words.copy_(padded.words)


def _filled(values: Tensor, count: int, value: int) -> Tensor:
    return values if count == 0 else F.pad(values, (0, count), value=value)


def _joined(values: Tensor, more: Tensor) -> Tensor:
    joined = values.new_empty(len(values) + len(more))
    joined[: len(values)], joined[len(values) :] = values, more
    return joined
