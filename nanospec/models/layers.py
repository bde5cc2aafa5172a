"""The parts of a decoder layer, named as in Hugging Face's modules.

In float32 they compute the same; in 16 bits RMSNorm rounds once, after the weight, not before.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanospec.attention.backend import AttentionBackend, FusesQKV
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.config import ModelConfig, RopeConfig


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    # Uninitialised: the loader fills every parameter or raises.
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T (+ b); several checkpoint tensors may be fused along the outputs."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
    ):
        super().__init__()
        self.weight = _parameter((outputs, inputs), dtype, device)
        self.bias = _parameter((outputs,), dtype, device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return linear(x, self.weight) if self.bias is None else F.linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, [.., outputs], of x [.., inputs]."""
    if _has_kernels(x):
        from nanospec.models import linear_triton

        if linear_triton.can_run(x, weight):
            return linear_triton.linear(x, weight)
    return F.linear(x, weight)


def linear_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """Return `swiglu` of `linear`."""
    if _has_kernels(x):
        from nanospec.models import linear_triton

        if linear_triton.can_run(x, weight):
            return linear_triton.linear_swiglu(x, weight)
    return swiglu(linear(x, weight))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = _parameter((width,), dtype, device)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape."""
        return self.add(x, None)[1]

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + delta, and that normalised; all of one shape [..., width]."""
        if _has_kernels(x):
            # Imported here: Triton takes long to import and a CPU needs none.
            from nanospec.models import layers_triton

            return layers_triton.add_rms_norm(x, delta, self.weight, self._eps)
        return add_rms_norm(x, delta, self.weight, self._eps)


def _has_kernels(x: Tensor) -> bool:
    # Kernels have no gradients.
    return x.is_cuda and not torch.is_grad_enabled()


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `RMSNorm.add`; the weight is [width]."""
    x = x if delta is None else x + delta
    # In training the weight may be wider than the activations, which has no fused kernel.
    return x, F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [.., I], of gate and up side by side, [.., 2 I]."""
    if _has_kernels(x):
        from nanospec.models import layers_triton

        return layers_triton.swiglu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


class RotaryEmbedding:
    """Rotation of query and key heads by their positions; kinds default, linear, llama3, yarn."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device):
        frequencies, self._scale = inverse_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(device)  # [D / 2] fp32

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, 1, D] for positions [T], computed in fp32."""
        if _has_kernels(positions):
            from nanospec.models import layers_triton

            return layers_triton.rope_tables(positions, self._frequencies, self._scale, dtype)
        return rope_tables(positions, self._frequencies, self._scale, dtype)


def rope_tables(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `RotaryEmbedding.tables`; frequencies are [D / 2] fp32."""
    angles = positions[:, None, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, h, D]: the first half of D pairs with the second."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle per position of each pair, [D / 2] fp32, and a factor for cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.parameters["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope.parameters), 1.0
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim), _yarn_scale(rope.parameters)
    return plain, 1.0


def _llama3(plain: Tensor, parameters: Mapping[str, float]) -> Tensor:
    """Slow down long wavelengths, keep short ones, blend between. Source: Llama 3.1's release."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / parameters["factor"]


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Blend by how often a pair turns over the original context. Source: YaRN, arXiv:2309.00071."""
    original = rope.parameters["original_max_position_embeddings"]

    def pair_turning(turns: float) -> float:
        ratio = original / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    first = pair_turning(rope.parameters.get("beta_fast") or 32)
    last = pair_turning(rope.parameters.get("beta_slow") or 1)
    if rope.parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float32)
    slow = ((steps - first) / max(last - first, 0.001)).clamp(0, 1)  # [D / 2]
    return (1 - slow) * plain + slow * plain / rope.parameters["factor"]


def _yarn_scale(parameters: Mapping[str, float]) -> float:
    """YaRN's temperature, folded into cos and sin."""
    if "attention_factor" in parameters:
        return parameters["attention_factor"]

    def magnitude(weight: float) -> float:
        factor = parameters["factor"]
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return magnitude(1.0)


class Attention(nn.Module):
    """Grouped-query attention with fused QKV; Qwen3 normalises query and key heads before RoPE."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self._layer = layer
        self._eps = config.rms_norm_eps
        self._split = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        width = sum(self._split) * config.head_dim
        self._head_dim = config.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, dtype, device)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, dtype, device)
        self._qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Tensor:
        """Map [T, H] to [T, H]; `rope` is what `RotaryEmbedding.tables` gives."""
        qkv = self.qkv_proj(x)
        if _has_kernels(x) and isinstance(attention, FusesQKV):
            out = attention.attend_qkv(self._layer, qkv, self.norms, rope)
            fused: Tensor = self.o_proj(out.flatten(1))
            return fused
        heads = qkv.unflatten(-1, (-1, self._head_dim))
        q, k, v = heads.split(self._split, dim=1)
        if self._qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attention.attend(self._layer, rotate(q, *rope), rotate(k, *rope), v)
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected

    @property
    def num_kv_rows(self) -> int:
        """How many of the last rows of the projection make keys and values: 2 Hkv * D."""
        return 2 * self._split[1] * self._head_dim

    @property
    def norms(self) -> tuple[Tensor, Tensor, float] | None:
        """Weights of the head norms, and their epsilon."""
        return (self.q_norm.weight, self.k_norm.weight, self._eps) if self._qk_norm else None

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys, rotated, and values, [T, Hkv, D] each, of rows [T, H] that ask nothing."""
        heads = F.linear(x, self.qkv_proj.weight[-self.num_kv_rows :])
        k, v = heads.view(len(x), -1, self._head_dim).chunk(2, dim=1)
        if self._qk_norm:
            k = self.k_norm(k)
        return rotate(k, *rope), v


class StackedKeysValues:
    """Keys and values of several layers, all made of the same rows: one product, one launch.

    Invariant: the layers' weights are views of what is kept here.
    """

    def __init__(self, layers: Sequence[Attention]):
        """Bring the weights of layers of one shape together, each in a place of its own."""
        self._layers = layers
        weights = _stack([layer.qkv_proj.weight for layer in layers])
        self._weights = weights[:, -layers[0].num_kv_rows :]  # [L, 2 Hkv * D, H]
        norms = [layer.norms for layer in layers]
        self._norms = None
        if norms[0] is not None:
            self._norms = (_stack([layer.k_norm.weight for layer in layers]), norms[0][2])

    def store(
        self, x: Tensor, rope: tuple[Tensor, Tensor], cache: PagedKVCache, slots: Tensor
    ) -> None:
        """Store keys and values of rows [T, H] in slots [T] of all layers of a cache."""
        if _has_kernels(x) and cache.head_dim & (cache.head_dim - 1) == 0:
            from nanospec.attention import qkv_triton

            kv = torch.bmm(x.expand(len(self._weights), -1, -1), self._weights.mT)
            qkv_triton.store_layers(kv, self._norms, rope, cache.k, cache.v, slots)
            return
        for index, layer in enumerate(self._layers):
            cache.store(index, *layer.keys_values(x, rope), slots)


def _stack(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move parameters of one shape into one tensor [L, ..], of which they become parts."""
    whole = torch.stack([parameter.data for parameter in parameters])
    for parameter, own in zip(parameters, whole, strict=True):
        parameter.data = own
    return whole


class MLP(nn.Module):
    """SwiGLU with fused gate and up projections."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, dtype, device)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, H] to [T, H]."""
        projected: Tensor = self.down_proj(linear_swiglu(x, self.gate_up_proj.weight))
        return projected
