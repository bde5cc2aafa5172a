"""Attention request by request through torch's SDPA: the specification, and the CPU's backend."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanospec.attention import mask
from nanospec.attention.backend import HOST_PLANNED
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.types import Capability

# Rows at once: longer chunks are cut, as half the square of a causal mask is wasted. What is masked
# otherwise is shorter.
_MOST_ROWS = 512


class TorchAttention:
    """See `AttentionBackend`. Works on every device, dtype, page size and head width."""

    def __init__(self, cache: PagedKVCache):
        self._cache = cache
        self._batch: ForwardBatch | None = None
        self._segments: list[_Segment] = []

    def capability(self, layer: int) -> Capability:
        """See `AttentionBackend.capability`; all layers are alike."""
        del layer
        return HOST_PLANNED

    def begin(self, batch: ForwardBatch) -> None:
        """Build each segment's page list and mask, once for all layers.

        Synchronises on a GPU where the host does not know the lengths.
        """
        self._batch = batch
        self._segments = []
        size, start = self._cache.page_size, 0
        for index, (qo_len, kv_len) in enumerate(zip(*batch.lens(), strict=True)):
            for first in range(0, qo_len, _MOST_ROWS):
                end = min(first + _MOST_ROWS, qo_len)
                rows = slice(start + first, start + end)
                seen = kv_len if batch.is_full else kv_len - qo_len + end
                pages = batch.page_tables[index, : -(-seen // size)].long()
                self._segments.append(_Segment(rows, seen, pages, _mask(batch, rows, seen)))
            start += qo_len

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        batch = self._batch
        assert batch is not None, "attend needs begin"
        self._cache.store(layer, k, v, batch.slots)
        keys, values = self._cache.pages(layer)
        out = q.new_zeros(q.shape)  # of rows of nobody too
        for segment in self._segments:
            out[segment.rows] = _attend_one(
                q[segment.rows],
                keys.index_select(0, segment.pages).flatten(0, 1)[: segment.kv_len],
                values.index_select(0, segment.pages).flatten(0, 1)[: segment.kv_len],
                segment.visible,
            )
        return out


@dataclass(frozen=True, slots=True)
class _Segment:
    rows: slice
    kv_len: int
    pages: Tensor  # [P] int64
    visible: Tensor | None  # [n, kv_len] bool; None if everything is


def _attend_one(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attend in one segment.

    The query heads that share a key head are laid out as more rows of that head, which saves
    repeating the keys.

    Args:
        q: [n, Hq, D].
        k: [kv_len, Hkv, D].
        v: [kv_len, Hkv, D].
        visible: [n, kv_len] bool; None if everything is.

    Returns:
        [n, Hq, D].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    rows = q.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    if visible is not None:
        visible = visible.repeat(group, 1)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    # SDPA has its fused CPU kernel for four dimensions only.
    out = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=visible)[0]
    return out.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def _mask(batch: ForwardBatch, rows: slice, kv_len: int) -> Tensor | None:
    """Return who sees whom in a segment, [n, kv_len] bool, or None if all see all."""
    num_rows = rows.stop - rows.start
    if batch.is_full or num_rows <= 1:
        return None
    visible = mask.causal_mask(num_rows, batch.slots.device)
    if batch.words is not None and num_rows <= mask.MAX_MASKED_ROWS:
        words = batch.words[rows]
        visible = torch.where((words != 0)[:, None], mask.unpack_words(words), visible)
    return mask.full_mask(visible, kv_len)
