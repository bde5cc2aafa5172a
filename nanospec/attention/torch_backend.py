"""Attention request by request through torch's SDPA: the specification, and the CPU's backend."""

import torch.nn.functional as F
from torch import Tensor

from nanospec.attention import mask
from nanospec.attention.backend import HOST_PLANNED
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.types import Capability


class TorchAttention:
    """See `AttentionBackend`. Works on every device, dtype, page size and head width."""

    def __init__(self, cache: PagedKVCache):
        self._cache = cache
        self._batch: ForwardBatch | None = None
        self._pages: list[Tensor] = []
        self._masks: list[Tensor | None] = []

    def capability(self, layer: int) -> Capability:
        """See `AttentionBackend.capability`; all layers are alike."""
        del layer
        return HOST_PLANNED

    def begin(self, batch: ForwardBatch) -> None:
        """Build each segment's page list and mask, once for all layers."""
        self._batch = batch
        size = self._cache.page_size
        self._pages = [
            batch.slots.new_tensor(table[: -(-kv_len // size)])
            for table, kv_len in zip(batch.page_tables, batch.kv_lens, strict=True)
        ]
        self._masks = [_segment_mask(batch, index) for index in range(batch.num_reqs)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        batch = self._batch
        assert batch is not None, "attend needs begin"
        self._cache.store(layer, k, v, batch.slots)
        keys, values = self._cache.pages(layer)
        out = q.new_empty(q.shape)
        start = 0
        for index, (qo_len, kv_len) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
            if qo_len == 0:
                continue
            rows = slice(start, start + qo_len)
            start += qo_len
            pages = self._pages[index]
            out[rows] = _attend_one(
                q[rows],
                keys.index_select(0, pages).flatten(0, 1)[:kv_len],
                values.index_select(0, pages).flatten(0, 1)[:kv_len],
                self._masks[index],
            )
        return out


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


def _segment_mask(batch: ForwardBatch, index: int) -> Tensor | None:
    """Return who sees whom in a segment, [qo_len, kv_len] bool, or None if all see all."""
    qo_len, kv_len = batch.qo_lens[index], batch.kv_lens[index]
    if index >= batch.num_unmasked:
        assert batch.visibility is not None, "masked segments have words"
        start = sum(batch.qo_lens[batch.num_unmasked : index])
        return mask.full_mask(mask.unpack_words(batch.visibility[start : start + qo_len]), kv_len)
    if batch.is_full or qo_len <= 1:
        return None
    return mask.full_mask(mask.causal_mask(qo_len, batch.slots.device), kv_len)
