"""Attention through our own paged kernel, which reads every length on the device.

It needs no plan from the host, so a forward may be launched before the host knows how long requests
are, and be captured in a graph.
"""

import torch
from torch import Tensor

from nanospec.attention import launch, paged_triton, qkv_triton
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.mask import MAX_MASKED_ROWS
from nanospec.types import Capability, PlanKind

HEAD_DIMS = (16, 32, 64, 128)


class TritonAttention:
    """See `AttentionBackend`. Head widths of `HEAD_DIMS`, any dtype and page size."""

    def __init__(self, cache: PagedKVCache, num_heads: int):
        self._cache = cache
        self._num_heads = num_heads
        device = cache.k.device
        self._num_sms = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else 1
        )
        self._batch: ForwardBatch | None = None

    def capability(self, layer: int) -> Capability:
        """See `AttentionBackend.capability`; all layers are alike."""
        del layer
        return Capability(PlanKind.MASK, MAX_MASKED_ROWS, takes_device_counts=True)

    def begin(self, batch: ForwardBatch) -> None:
        """List the tiles of rows, on the device; may be captured."""
        self._batch = batch
        num_rows, num_reqs = batch.num_tokens, batch.num_reqs
        self._shape = launch.launch_shape(
            num_rows=num_rows,
            num_reqs=num_reqs,
            max_rows=max(batch.max_rows, 1),
            num_heads=self._num_heads,
            num_kv_heads=self._cache.num_kv_heads,
            num_sms=self._num_sms,
        )
        num_tiles = launch.num_tiles(num_rows, num_reqs, self._shape.block_rows)
        self._tiles = batch.qo_indptr.new_empty(paged_triton.TILE_FIELDS, num_tiles)
        size = launch.scratch_size(
            num_rows=num_rows,
            num_heads=self._num_heads,
            head_dim=self._cache.head_dim,
            num_splits=self._shape.num_splits,
        )
        self._scratch = torch.empty(size, dtype=torch.float32, device=batch.slots.device)
        if num_rows > 0:
            paged_triton.tile_segments(
                self._tiles,
                qo_indptr=batch.qo_indptr,
                kv_lens=batch.kv_lens,
                block_rows=self._shape.block_rows,
            )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`. Rows of nobody get anything."""
        assert self._batch is not None, "attend needs begin"
        self._cache.store(layer, k, v, self._batch.slots)
        return self._read(layer, q)

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """See `FusesQKV.attend_qkv`."""
        assert self._batch is not None, "attend needs begin"
        k, v = self._cache.k[layer], self._cache.v[layer]
        slots = self._batch.slots
        q = qkv_triton.rotate_and_store(qkv, self._num_heads, norms, rope, k, v, slots)
        return self._read(layer, q)

    def _read(self, layer: int, q: Tensor) -> Tensor:
        """Attend to what is stored."""
        batch = self._batch
        assert batch is not None, "attend needs begin"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        paged_triton.paged_attention(
            q,
            self._cache.k[layer],
            self._cache.v[layer],
            out,
            tiles=self._tiles,
            qo_indptr=batch.qo_indptr,
            page_tables=batch.page_tables,
            words=batch.words,
            page_size=self._cache.page_size,
            is_full=batch.is_full,
            shape=self._shape,
            scratch=self._scratch,
        )
        return out
