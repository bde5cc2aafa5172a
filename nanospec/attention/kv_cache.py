"""Keys and values of all layers, in pages, addressed by slot."""

import torch
from torch import Tensor


class PagedKVCache:
    """Slot s of a layer holds the key and value of one token; page p is slots p * size and on.

    The last page is never handed out: rows that nobody will read are stored there.

    Keys are stored rotated. What a slot holds is finite from the start: a masked weight of zero
    times uninitialised memory could be NaN.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # [L, S, Hkv, D]
        self.v = torch.zeros(shape, dtype=dtype, device=device)  # [L, S, Hkv, D]
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return self.k.shape[1] // self.page_size

    @property
    def scratch_slot(self) -> int:
        """Where rows that nobody will read are stored."""
        return (self.num_pages - 1) * self.page_size

    @property
    def head_dim(self) -> int:
        """D."""
        return self.k.shape[-1]

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return self.k.shape[-2]

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write the keys and values [T, Hkv, D] of a layer to slots [T]."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer by page: views [num_pages, page_size, Hkv, D]."""
        shape = (-1, self.page_size, self.num_kv_heads, self.head_dim)
        return self.k[layer].view(shape), self.v[layer].view(shape)
