"""Attention through FlashInfer's paged prefill kernels.

One kernel serves every segment: it takes any number of rows.
"""

from dataclasses import dataclass

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from nanospec.attention import mask
from nanospec.attention.backend import HOST_PLANNED
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.types import Capability

# Partial results of requests whose keys are split over several blocks go here. FlashInfer raises
# where it does not suffice; 64 requests of 8 rows on 64 query heads need 383 MiB (formula of its
# scheduler: heads * padded tiles * tile rows * (head width + 1) * 4 bytes).
_WORKSPACE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class _Plan:
    """A contiguous run of rows and the wrapper that is planned for it."""

    wrapper: BatchPrefillWithPagedKVCacheWrapper
    rows: slice


class FlashInferAttention:
    """See `AttentionBackend`. Head widths 64 and 128, in 16-bit floats.

    Causal segments never pay for masked ones: each group has a plan and a kernel launch of its own.
    """

    def __init__(self, cache: PagedKVCache, num_heads: int, workspace: Tensor | None = None):
        self._cache = cache
        self._num_heads = num_heads
        device = cache.k.device
        if workspace is None:
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.workspace = workspace
        # fa2 by name: "auto" picks fa3 on Hopper for a first plan without a mask and keeps it,
        # and FlashInfer's fa3 takes no mask. The two run one after the other and share workspace.
        self._plain = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._masked = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        # A plan travels to the GPU from a pinned buffer, which the next plan overwrites.
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        self._batch: ForwardBatch | None = None
        self._plans: list[_Plan] = []

    def capability(self, layer: int) -> Capability:
        """See `AttentionBackend.capability`; all layers are alike."""
        del layer
        return HOST_PLANNED

    def begin(self, batch: ForwardBatch) -> None:
        """Plan the kernels for this batch's lengths; see `AttentionBackend.begin`.

        Synchronises where the host does not know the lengths.
        """
        self._planned.synchronize()
        self._batch = batch
        self._plans = []
        split, qo_lens = batch.num_unmasked, batch.lens()[0]
        self._plan(self._plain, range(split), first_row=0)
        self._plan(self._masked, range(split, batch.num_reqs), first_row=sum(qo_lens[:split]))
        self._planned.record()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        batch = self._batch
        assert batch is not None, "attend needs begin"
        self._cache.store(layer, k, v, batch.slots)
        out = torch.empty_like(q)
        for plan in self._plans:
            plan.wrapper.run(q[plan.rows], self._cache.pages(layer), out=out[plan.rows])
        return out

    def _plan(
        self, wrapper: BatchPrefillWithPagedKVCacheWrapper, segments: range, *, first_row: int
    ) -> None:
        batch, size = self._batch, self._cache.page_size
        assert batch is not None
        all_qo_lens, all_kv_lens = batch.lens()
        live = [index for index in segments if all_qo_lens[index] > 0]
        if not live:
            return
        qo_lens = [all_qo_lens[index] for index in live]
        kv_lens = [all_kv_lens[index] for index in live]
        num_pages = [-(-kv_len // size) for kv_len in kv_lens]
        pages = torch.cat(
            [batch.page_tables[index, :count] for index, count in zip(live, num_pages, strict=True)]
        )
        custom_mask = None
        if live[0] >= batch.num_unmasked:
            assert batch.words is not None, "masked segments have words"
            words = batch.words[first_row : first_row + sum(qo_lens)]
            custom_mask = _custom_mask(words, qo_lens, kv_lens)
        # Lengths stay on the host, where the planner wants them; pages go to the device.
        wrapper.plan(
            _offsets(qo_lens),
            _offsets(num_pages),
            pages,
            torch.tensor([(length - 1) % size + 1 for length in kv_lens], dtype=torch.int32),
            self._num_heads,
            self._cache.num_kv_heads,
            self._cache.head_dim,
            size,
            custom_mask=custom_mask,
            causal=not batch.is_full,
            q_data_type=self._cache.k.dtype,  # FlashInfer's default is float16
            kv_data_type=self._cache.k.dtype,
        )
        self._plans.append(_Plan(wrapper, slice(first_row, first_row + sum(qo_lens))))


def _offsets(lengths: list[int]) -> Tensor:
    """Return [n + 1] int32 on the host: where each run starts, and the end."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(lengths).cumsum(0)
    return offsets


def _custom_mask(words: Tensor, qo_lens: list[int], kv_lens: list[int]) -> Tensor:
    """Return FlashInfer's flat mask: each segment's [qo_len, kv_len], one after the other."""
    masks = [
        mask.full_mask(mask.unpack_words(own), kv_len).flatten()
        for own, kv_len in zip(torch.split(words, qo_lens), kv_lens, strict=True)
    ]
    return torch.cat(masks)
