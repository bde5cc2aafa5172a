"""From projected rows to queries and cached keys and values: norm, rotation and store at once.

The specification is what `models.layers.Attention` does before attention, and `PagedKVCache.store`.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanospec import pdl

_HEADS = 8  # of one program


@triton.jit
def _qkv_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    num_heads,
    num_kv_heads,
    stride_layer,
    IS_NORMED: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    layer = tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, DIM)
    partner = (dim + DIM // 2) % DIM  # the first half of a head pairs with the second
    total = num_heads + 2 * num_kv_heads
    live = (head < total)[:, None]
    base = qkv_ptr + (layer * tl.num_programs(0) + row) * total * DIM + head[:, None] * DIM
    k_weight_ptr += layer * DIM
    k_ptr += layer * stride_layer
    v_ptr += layer * stride_layer
    is_q = (head < num_heads)[:, None]
    is_v = (head >= num_heads + num_kv_heads)[:, None]
    if IS_NORMED:
        q_weight = tl.load(q_weight_ptr + dim).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + dim).to(tl.float32)
        own_weight = tl.where(is_q, q_weight[None, :], k_weight[None, :])
        q_weight = tl.load(q_weight_ptr + partner).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + partner).to(tl.float32)
        other_weight = tl.where(is_q, q_weight[None, :], k_weight[None, :])
    pdl.wait(PDL)
    x = tl.load(base + dim[None, :], mask=live, other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    own = x.to(tl.float32)
    other = tl.load(base + partner[None, :], mask=live, other=0.0).to(tl.float32)
    if IS_NORMED:
        scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
        # Rounded where torch rounds, after the norm.
        own = (own * scale * own_weight).to(dtype).to(tl.float32)
        other = (other * scale * other_weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + row * DIM + dim).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * DIM + dim).to(tl.float32)[None, :]
    other = tl.where((dim < DIM // 2)[None, :], -other, other)
    rotated = (own * cos + other * sin).to(dtype)
    slot = tl.load(slots_ptr + row)
    to_q = q_ptr + (row * num_heads + head[:, None]) * DIM + dim[None, :]
    tl.store(to_q, rotated, mask=live & is_q)
    to_k = k_ptr + (slot * num_kv_heads + head[:, None] - num_heads) * DIM + dim[None, :]
    tl.store(to_k, rotated, mask=live & (is_q == 0) & (is_v == 0))
    kv_head = head[:, None] - num_heads - num_kv_heads
    to_v = v_ptr + (slot * num_kv_heads + kv_head) * DIM + dim[None, :]
    tl.store(to_v, x, mask=live & is_v)


def rotate_and_store(
    qkv: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> Tensor:
    """Normalise and rotate query and key heads; store keys and values; return the queries.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], projected.
        num_heads: Hq.
        norms: weights [D] of query and key heads, and epsilon; None: heads are not normalised.
        rope: cosines and sines [T, 1, D].
        k: [S, Hkv, D], a layer's keys, to be written.
        v: [S, Hkv, D], its values.
        slots: [T] int64.

    Returns:
        [T, Hq, D].
    """
    q = qkv.new_empty(len(qkv), num_heads, k.shape[-1])
    _launch(qkv[None], q, norms, rope, k[None], v[None], slots)
    return q


def store_layers(
    kv: Tensor,
    norms: tuple[Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> None:
    """Normalise and rotate the key heads of several layers; store keys and values.

    Args:
        kv: [L, T, 2 Hkv * D], projected.
        norms: weights [L, D] of key heads, and epsilon; None: heads are not normalised.
        rope: cosines and sines [T, 1, D].
        k: [L, S, Hkv, D], keys, to be written.
        v: [L, S, Hkv, D], values.
        slots: [T] int64.
    """
    own = None if norms is None else (norms[0], *norms)
    _launch(kv, kv.new_empty(kv.shape[1], 0, k.shape[-1]), own, rope, k, v, slots)


def _launch(
    qkv: Tensor,
    q: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> None:
    num_layers, num_rows, width = qkv.shape
    num_heads, (num_kv_heads, head_dim) = q.shape[1], k.shape[-2:]
    total = num_heads + 2 * num_kv_heads
    assert width == total * head_dim and qkv.is_contiguous(), "malformed projection"
    assert k.stride() == v.stride() and k[0].is_contiguous(), "malformed cache"
    if num_rows == 0:
        return
    cos, sin = rope
    q_weight, k_weight, eps = norms or (cos, cos, 0.0)
    assert norms is None or k_weight.numel() == num_layers * head_dim, "a norm for each layer"
    _qkv_kernel[(num_rows, triton.cdiv(total, _HEADS), num_layers)](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        slots,
        q if num_heads else qkv,
        k,
        v,
        eps,
        num_heads,
        num_kv_heads,
        k.stride(0),
        IS_NORMED=norms is not None,
        DIM=head_dim,
        HEADS=_HEADS,
        num_warps=2,  # of a head 16 numbers a thread: two heads a warp, four times
        **pdl.launch_options(qkv),
    )
