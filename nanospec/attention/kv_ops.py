"""Row moves inside the paged KV cache. The reference here is the spec; `kv_ops_triton` is fast."""

import torch
from torch import Tensor


def move_kv(cache: Tensor, src: Tensor, dst: Tensor, counts: Tensor) -> None:
    """Copy slots `src` onto slots `dst` in place, for all layers.

    Source and target overlap inside a request: the accepted path 0, 2, 3 writes slots 1 and 2 while
    slot 2 is still to be read. The result is as if every read came before every write.

    Args:
        cache: [L, S, Hkv, D], keys or values.
        src: [R, M] int64 slots to read, those of one request in the order of its rows.
        dst: [R, M] int64 slots to write; row by row not after the slot that is read.
        counts: [R] int64, leading entries of each request that count.
    """
    if cache.is_cuda:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.attention import kv_ops_triton

        kv_ops_triton.move_kv(cache, src, dst, counts)
    else:
        move_kv_reference(cache, src, dst, counts)


def move_kv_reference(cache: Tensor, src: Tensor, dst: Tensor, counts: Tensor) -> None:
    """See `move_kv`. Advanced indexing copies the source first, so order does not matter here."""
    live = torch.arange(src.shape[1], device=src.device) < counts[:, None]
    cache[:, dst[live]] = cache[:, src[live]]
