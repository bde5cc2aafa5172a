"""`ForwardBatch`: the packed rows of one forward, and where their keys and values live."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows of R segments, packed without gaps; the rows of a segment follow each other.

    A segment sees the keys of its request: `kv_lens[r]` of them, the last `qo_lens[r]` of which
    belong to its own rows. The earlier ones, the context, are visible to every row. Inside the
    segment the mask decides: rows of a *causal* segment see themselves and earlier rows, rows of a
    *full* segment see all of its rows, rows of a *masked* segment what their visibility word says.

    Invariant: masked segments come last, and only they have words.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, rotary positions
    slots: Tensor  # [T] int64, where the rows' keys and values go
    qo_lens: list[int]  # [R] host, rows of each segment
    kv_lens: list[int]  # [R] host, keys each segment sees, its own rows included
    page_tables: list[list[int]]  # [R] host, pages of each request, at least kv_lens[r] slots
    logit_rows: Tensor  # [N] int64, rows whose logits are wanted
    is_full: bool = False  # segments without words are full instead of causal
    num_masked: int = 0  # segments with words, the last ones
    visibility: Tensor | None = None  # [rows of masked segments] int64, their words

    def __post_init__(self) -> None:
        _expect(len(self.qo_lens) == len(self.kv_lens) == len(self.page_tables), "page_tables")
        for name in ("token_ids", "positions", "slots"):
            _expect(getattr(self, name).shape == (self.num_tokens,), name)
        for qo_len, kv_len in zip(self.qo_lens, self.kv_lens, strict=True):
            _expect(0 <= qo_len <= kv_len, "kv_lens, which count a segment's own rows,")
        num_words = 0 if self.visibility is None else len(self.visibility)
        _expect(num_words == sum(self.qo_lens[self.num_unmasked :]), "visibility")

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.qo_lens)

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.qo_lens)

    @property
    def num_unmasked(self) -> int:
        """How many leading segments have no visibility words."""
        return self.num_reqs - self.num_masked


def slots_of(pages: Sequence[int], span: range, page_size: int) -> list[int]:
    """Return the slots of a request's tokens, by its pages."""
    return [pages[at // page_size] * page_size + at % page_size for at in span]


def batch_of_spans(
    spans: Sequence[range],
    page_tables: Sequence[list[int]],
    token_ids: Tensor,
    *,
    page_size: int,
    is_full: bool = False,
) -> ForwardBatch:
    """Return a batch of rows at their own positions, whose hidden states alone are wanted.

    Args:
        spans: R, the positions of each segment; it sees all keys of its request up to its end.
        page_tables: R, pages of each request.
        token_ids: [T] int64, of all spans in order.
        page_size: tokens per page.
        is_full: whether the rows of a span see all of it.
    """
    device = token_ids.device
    positions = torch.tensor([at for span in spans for at in span], dtype=torch.int64).to(device)
    slots = [
        slot
        for span, pages in zip(spans, page_tables, strict=True)
        for slot in slots_of(pages, span, page_size)
    ]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=torch.tensor(slots, dtype=torch.int64).to(device),
        qo_lens=[len(span) for span in spans],
        kv_lens=[span.stop for span in spans],
        page_tables=list(page_tables),
        logit_rows=positions[:0],
        is_full=is_full,
    )


def _expect(condition: bool, what: str) -> None:
    # A batch is built by the engine: a misfit is our bug, never a user's.
    assert condition, f"malformed ForwardBatch: {what} does not fit the other fields"
