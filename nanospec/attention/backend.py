"""The two methods every attention backend has, and the choice among backends."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.mask import MAX_MASKED_ROWS
from nanospec.errors import BackendUnavailableError
from nanospec.types import Capability, PlanKind

# Of backends that take every mask, and are told each segment's rows by the host.
HOST_PLANNED = Capability(
    kind=PlanKind.MASK,
    max_rows=MAX_MASKED_ROWS,
    takes_device_counts=False,
    reason="it plans on the host, from row counts the host knows",
)


class AttentionBackend(Protocol):
    """Attention over a paged cache. `begin` once per forward, then `attend` once per layer."""

    def capability(self, layer: int) -> Capability:
        """Return which plans this layer's attention can verify."""
        ...

    def begin(self, batch: ForwardBatch) -> None:
        """Prepare for a batch, once for all layers: plans of the host, or small kernels."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the rows' keys and values, then attend.

        Args:
            layer: index of the layer in the cache.
            q: [T, Hq, D].
            k: [T, Hkv, D], rotated.
            v: [T, Hkv, D].

        Returns:
            [T, Hq, D].
        """
        ...


@runtime_checkable
class FusesQKV(Protocol):
    """Attention that also does what comes before it, from the projection on."""

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Normalise and rotate heads, store keys and values, then attend.

        Args:
            layer: index of the layer in the cache.
            qkv: [T, (Hq + 2 Hkv) * D].
            norms: weights [D] of query and key heads, and epsilon; None: not normalised.
            rope: cosines and sines [T, 1, D].

        Returns:
            [T, Hq, D].
        """
        ...


def create_attention(
    name: str, cache: PagedKVCache, num_heads: int, *, beside: AttentionBackend | None = None
) -> AttentionBackend:
    """Build a backend over a cache.

    Args:
        name: torch, triton, flashinfer, flash3, or auto: triton on a GPU, torch on a CPU.
        cache: the keys and values of all layers.
        num_heads: Hq.
        beside: another backend that never runs at the same time; scratch memory is shared.

    Raises:
        BackendUnavailableError: the backend cannot run here or not on this cache.
    """
    device = cache.k.device
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        from nanospec.attention.torch_backend import TorchAttention

        return TorchAttention(cache)
    if device.type != "cuda":
        raise BackendUnavailableError(f"{name} needs a CUDA device; pass --attention torch")
    if name == "triton":
        from nanospec.attention.triton_backend import HEAD_DIMS, TritonAttention

        if cache.head_dim not in HEAD_DIMS:
            raise BackendUnavailableError(
                f"the Triton kernel is made for head widths {HEAD_DIMS}, this model has "
                f"{cache.head_dim}; pass --attention torch"
            )
        return TritonAttention(cache, num_heads)
    if name == "flash3":
        return _flash3(cache, num_heads)
    return _flashinfer(cache, num_heads, beside)


def _flash3(cache: PagedKVCache, num_heads: int) -> AttentionBackend:
    from nanospec.attention.flash3_backend import HEAD_DIMS, Flash3Attention

    if torch.cuda.get_device_capability(cache.k.device)[0] != 9:
        raise BackendUnavailableError(
            "FlashAttention 3 is made for Hopper GPUs; pass --attention triton"
        )
    if cache.k.dtype not in (torch.bfloat16, torch.float16) or cache.head_dim not in HEAD_DIMS:
        raise BackendUnavailableError(
            f"FlashAttention 3 is used in 16-bit floats for head widths {HEAD_DIMS}, not in "
            f"{cache.k.dtype} for {cache.head_dim}; pass --attention triton"
        )
    try:
        return Flash3Attention(cache, num_heads)
    except ImportError as error:
        raise BackendUnavailableError(
            f"FlashAttention 3 is not usable here: {error}; pass --attention triton"
        ) from error


def _flashinfer(
    cache: PagedKVCache, num_heads: int, beside: AttentionBackend | None
) -> AttentionBackend:
    try:
        from nanospec.attention.flashinfer_backend import FlashInferAttention
    except ImportError as error:
        raise BackendUnavailableError(
            f"FlashInfer is not usable here ({error}); install the extra: pip install -c "
            f"constraints.txt -e '.[gpu]', or pass --attention torch"
        ) from error
    if cache.k.dtype not in (torch.bfloat16, torch.float16):
        raise BackendUnavailableError(
            f"FlashInfer has no {cache.k.dtype} kernels; pass --dtype bfloat16, "
            f"or --attention torch"
        )
    if cache.head_dim not in (64, 128):
        raise BackendUnavailableError(
            f"FlashInfer is used for head widths 64 and 128, this model has {cache.head_dim}; "
            f"pass --attention torch"
        )
    shared = beside.workspace if isinstance(beside, FlashInferAttention) else None
    return FlashInferAttention(cache, num_heads, shared)
