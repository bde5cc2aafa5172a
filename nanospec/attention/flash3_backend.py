"""Attention through FlashAttention 3, where its library is installed.

The library is the one that vLLM brings, which is loaded alone: vLLM itself is not imported. It
reads every length on the device, so it can be captured in a graph like our own kernel; trees, which
it cannot mask, run in ours.
"""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.triton_backend import TritonAttention

HEAD_DIMS = (64, 128)  # that both kernels have
# The most splits of a segment's keys. The library takes fewer where segments are many or short; it
# costs a merge, some 3 us, so none are allowed where programs are enough without.
_MAX_SPLITS = 32
_ENOUGH_PROGRAMS = 96  # of the 132 multiprocessors of an H200, as measured
_TILE = 64  # rows times query heads of a KV head that one program takes


def load_library() -> None:
    """Load the kernels.

    Raises:
        ImportError: no package that brings them is installed, or they do not fit this torch.
    """
    package = importlib.util.find_spec("vllm")  # finds the folder, imports nothing
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    found = [
        path for folder in folders for path in Path(folder).glob("vllm_flash_attn/_vllm_fa3_C*.so")
    ]
    if not found:
        raise ImportError("its library comes with vLLM, which is not installed")
    try:
        torch.ops.load_library(str(found[0]))  # type: ignore[no-untyped-call]  # untyped in torch
    except OSError as error:
        raise ImportError(f"{found[0].name} does not load: {error}") from error


class Flash3Attention(TritonAttention):
    """See `AttentionBackend`. Head widths of `HEAD_DIMS`, in 16-bit floats, on Hopper.

    A forward that may have masked segments runs in our own kernel, whole.
    """

    def __init__(self, cache: PagedKVCache, num_heads: int):
        super().__init__(cache, num_heads)
        load_library()
        self._library = torch.ops._vllm_fa3_C
        self._num_splits = 1
        self._metadata: Tensor | None = None

    def begin(self, batch: ForwardBatch) -> None:
        """Balance the work among the multiprocessors, on the device; may be captured."""
        self._metadata = None
        if batch.num_tokens == 0 or (batch.words is not None and not batch.is_full):
            super().begin(batch)
            return
        self._batch = batch
        cache, num_rows = self._cache, batch.num_tokens
        group = self._num_heads // cache.num_kv_heads
        # A graph does not know how many of its segments are live; so many are at least.
        segments = max(-(-num_rows // max(batch.max_rows, 1)), num_rows * group // _TILE)
        self._num_splits = 1 if segments * cache.num_kv_heads >= _ENOUGH_PROGRAMS else _MAX_SPLITS
        self._metadata = self._library.get_scheduler_metadata(
            batch.num_reqs,
            batch.max_rows,
            self._max_keys(batch),
            self._num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.head_dim,
            cache.k.dtype,
            batch.kv_lens,
            batch.qo_indptr,
            *(None, None, None, None),  # offsets of unpaged and of new keys, rows used, padding
            cache.page_size,
            0,  # new keys: they are stored already
            not batch.is_full,
            *(-1, -1),  # window
            False,  # softcap
            self._num_splits,
            None,  # whether a group's heads share a tile: as the library chooses
            0,  # multiprocessors to leave alone
        )

    def _read(self, layer: int, q: Tensor) -> Tensor:
        """Attend to what is stored."""
        batch = self._batch
        if self._metadata is None:
            return super()._read(layer, q)
        assert batch is not None, "attend needs begin"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys, values = self._cache.pages(layer)
        self._library.fwd(
            q,
            keys,
            values,
            *(None, None, None),  # new keys and values, a second query
            out,
            batch.qo_indptr,
            *(None, None, None),  # offsets of unpaged and of new keys, rows used
            batch.kv_lens,
            batch.max_rows,
            self._max_keys(batch),
            batch.page_tables,
            *(None, None),  # other order of requests, padding
            *(None, None, None),  # rotations
            *(None, None, None),  # scales
            self._cache.head_dim**-0.5,
            not batch.is_full,
            *(-1, -1),  # window
            0.0,  # softcap
            True,  # of rotations, which there are none of
            self._metadata,
            self._num_splits,
            None,
            0,
            None,  # sinks
            *(1, 0, None),  # context parallelism
        )
        return out

    def _max_keys(self, batch: ForwardBatch) -> int:
        return batch.page_tables.shape[1] * self._cache.page_size
