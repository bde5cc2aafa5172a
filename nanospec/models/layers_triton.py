"""Triton versions of `layers`; each function has the contract of its namesake there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec import pdl


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    eps,
    width,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    live = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    pdl.wait(PDL)
    x = tl.load(x_ptr + at, mask=live, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + at, mask=live, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, x, mask=live)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out_ptr + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=live)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `layers.add_rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    if x.numel() > 0:
        _add_rms_norm_kernel[(x.numel() // width,)](
            x,
            x if delta is None else delta.contiguous(),
            weight,
            total,
            out,
            eps,
            width,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 8),
            **pdl.launch_options(x),
        )
    return total, out


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    pdl.wait(PDL)
    gate = tl.load(x_ptr + row * 2 * width + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=live, other=0.0).to(tl.float32)
    # Rounded where torch rounds, between the two steps.
    gate = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + column, (gate * up).to(out_ptr.dtype.element_ty), mask=live)


def swiglu(x: Tensor) -> Tensor:
    """See `layers.swiglu`."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    if x.numel() > 0:
        block = min(triton.next_power_of_2(width), 1024)
        _swiglu_kernel[(out.numel() // width, triton.cdiv(width, block))](
            x, out, width, BLOCK=block, **pdl.launch_options(x)
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])  # a slice may start anywhere
def _rope_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    half,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    live = pair < half
    pdl.wait(PDL)
    position = tl.load(positions_ptr + row).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + pair, mask=live, other=0.0)
    cos = (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty)
    at = row * 2 * half + pair
    tl.store(cos_ptr + at, cos, mask=live)
    tl.store(cos_ptr + at + half, cos, mask=live)
    tl.store(sin_ptr + at, sin, mask=live)
    tl.store(sin_ptr + at + half, sin, mask=live)


def rope_tables(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `layers.rope_tables`."""
    half = len(frequencies)
    cos, sin = frequencies.new_empty(2, len(positions), 1, 2 * half, dtype=dtype).unbind()
    if len(positions) > 0:
        _rope_kernel[(len(positions),)](
            positions,
            frequencies,
            cos,
            sin,
            scale,
            half,
            BLOCK=triton.next_power_of_2(half),
            num_warps=1,
            **pdl.launch_options(positions),
        )
    return cos, sin
