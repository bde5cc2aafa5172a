"""`ForwardBatch`: the packed rows of one forward, and where their keys and values live."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanospec.device import Array, to_device

LONG_ROWS = 65  # a segment of so many rows is part of a prompt: no plan has as many


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of R segments, packed without gaps, then perhaps rows of nobody that fill up the batch.

    A segment sees the keys of its request: `kv_lens[r]` of them, the last of which belong to its
    own rows. The earlier ones, the context, are visible to every row. Inside the segment the mask
    decides: rows see themselves and earlier rows; if the batch `is_full`, all of their segment; if
    they have a word that is not 0, what that says (see `attention.mask`).

    Lengths live on the device. The host knows bounds, and mostly the lengths too.

    Invariant: masked segments, those whose words are not 0, come last.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, rotary positions
    slots: Tensor  # [T] int64, where the rows' keys and values go
    qo_indptr: Tensor  # [R + 1] int32, where each segment's rows start, and the end, at most T
    kv_lens: Tensor  # [R] int32, keys each segment sees, its own rows included
    page_tables: Tensor  # [R, P] int32, pages of each request; anything behind those it needs
    logit_rows: Tensor  # [N] int64, rows whose logits are wanted
    max_rows: int  # of one segment, at least
    is_full: bool = False
    num_masked: int = 0  # masked segments
    words: Tensor | None = None  # [T] int64; None if all are 0
    host_lens: tuple[list[int], list[int]] | None = None  # rows and keys of each segment, if known

    def __post_init__(self) -> None:
        for name in ("positions", "slots"):
            _expect(getattr(self, name).shape == (self.num_tokens,), name)
        _expect(self.qo_indptr.shape == (self.num_reqs + 1,), "qo_indptr")
        _expect(len(self.page_tables) == self.num_reqs, "page_tables")
        _expect(self.words is None or len(self.words) == self.num_tokens, "words")
        _expect(self.num_masked == 0 or self.words is not None, "num_masked")
        if self.host_lens is not None:
            qo_lens, kv_lens = self.host_lens
            _expect(len(qo_lens) == len(kv_lens) == self.num_reqs, "host_lens")
            _expect(sum(qo_lens) <= self.num_tokens, "host_lens")
            _expect(max(qo_lens, default=0) <= self.max_rows, "max_rows")
            for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
                _expect(0 <= qo_len <= kv_len, "kv_lens, which count a segment's own rows,")

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.kv_lens)

    @property
    def num_unmasked(self) -> int:
        """How many leading segments have no words."""
        return self.num_reqs - self.num_masked

    def lens(self) -> tuple[list[int], list[int]]:
        """Return rows and keys of each segment; synchronises where the host does not know them."""
        if self.host_lens is not None:
            return self.host_lens
        *starts, _ = indptr = self.qo_indptr.tolist()
        qo_lens = [end - start for start, end in zip(starts, indptr[1:], strict=True)]
        return qo_lens, self.kv_lens.tolist()


def build_batch(
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    qo_lens: list[int],
    kv_lens: list[int],
    page_tables: Sequence[Sequence[int]],
    logit_rows: Tensor,
    *,
    is_full: bool = False,
    num_masked: int = 0,
    words: Tensor | None = None,
) -> ForwardBatch:
    """Return a batch whose lengths the host knows; arguments are those of `ForwardBatch`."""
    device = token_ids.device
    indptr = [0]
    for qo_len in qo_lens:
        indptr.append(indptr[-1] + qo_len)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        qo_indptr=to_device(indptr, device, torch.int32),
        kv_lens=to_device(kv_lens, device, torch.int32),
        page_tables=to_device(padded_tables(page_tables), device, torch.int32),
        logit_rows=logit_rows,
        max_rows=max(qo_lens, default=0),
        is_full=is_full,
        num_masked=num_masked,
        words=words,
        host_lens=(qo_lens, kv_lens),
    )


def padded_tables(page_tables: Sequence[Sequence[int]]) -> Array:
    """Return page tables of the same width, [R, P] int32, padded with page 0; P is 1 at least.

    They are joined as bytes: numpy would read each number of many requests, for every forward.
    """
    lens = np.array([len(table) for table in page_tables], dtype=np.int64)
    padded = np.zeros((len(lens), max(1, lens.max(initial=0))), dtype=np.int32)
    is_page = np.arange(padded.shape[1]) < lens[:, None]
    padded[is_page] = np.frombuffer(b"".join(array("i", table) for table in page_tables), np.int32)
    return padded


def slots_of(pages: Sequence[int], span: range, page_size: int) -> list[int]:
    """Return the slots of a request's tokens, by its pages."""
    return [pages[at // page_size] * page_size + at % page_size for at in span]


def batch_of_spans(
    spans: Sequence[range],
    page_tables: Sequence[Sequence[int]],
    token_ids: Tensor,
    *,
    page_size: int,
) -> ForwardBatch:
    """Return a batch of rows at their own positions, whose hidden states alone are wanted.

    Args:
        spans: R, the positions of each segment; it sees all keys of its request up to its end.
        page_tables: R, pages of each request.
        token_ids: [T] int64, of all spans in order.
        page_size: tokens per page.
    """
    device = token_ids.device
    positions = to_device([at for span in spans for at in span], device)
    slots = [
        slot
        for span, pages in zip(spans, page_tables, strict=True)
        for slot in slots_of(pages, span, page_size)
    ]
    return build_batch(
        token_ids,
        positions,
        to_device(slots, device),
        [len(span) for span in spans],
        [span.stop for span in spans],
        page_tables,
        positions[:0],
    )


def _expect(condition: bool, what: str) -> None:
    # A batch is built by the engine: a misfit is our bug, never a user's.
    assert condition, f"malformed ForwardBatch: {what} does not fit the other fields"
