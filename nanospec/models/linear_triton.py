"""Linear layers for a few rows, where reading the weights is all the work.

Knows how to keep the memory busy: cuBLAS leaves it idle while a product starts and ends, which for
one row is a sixth of the time. Weights never depend on what runs before, so for one row the first
of them are asked for before the kernel before has ended (`nanospec.pdl`). The specification is
`F.linear`, and `layers.swiglu` of it.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec import pdl

MAX_ROWS = 16
# Where outputs are a vocabulary, cuBLAS reads 4.4 TB/s of an H200's 4.8 already.
MAX_OUTPUTS = 1 << 16
# A lone row is multiplied without tensor cores, and sums stay where weights arrive. So can two or
# four rows, which is no faster over all layers: scripts/bench_linear.py --search.
_FMA_ROWS = 1
_SHARED_MEMORY = 200 << 10  # bytes that the largest of the shapes below takes


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How a product is cut into programs. Results depend on it in their last bits only.

    A program takes some rows of the weights and walks over all inputs, a tile at a time.
    """

    uses_dot: bool  # tensor cores; else every thread sums products of the weights it loads
    padded_rows: int  # rows of x that are computed
    block_outputs: int  # rows of the weights in a tile
    block_inputs: int
    num_warps: int
    num_stages: int  # tiles between asking for weights and needing them, plus one
    overlaps: bool = True  # whether it starts before the kernel before has ended, where that works


@functools.cache
def launch_shape(*, num_rows: int, outputs: int, inputs: int, num_sms: int) -> LaunchShape:
    """Choose a shape. Found on an H200 with the layers of Qwen3-8B, by scripts/bench_linear.py.

    Args:
        num_rows: T, 1 to `MAX_ROWS`; all from 2 on get the same.
        outputs: rows of the weights, a multiple of 16.
        inputs: a multiple of 128.
        num_sms: multiprocessors of the GPU.
    """
    if num_rows <= _FMA_ROWS:
        return _fma_shape(outputs, inputs, num_sms)
    padded_rows = 16  # with 8, which tensor cores take as well, all layers took longer
    # Programs run at once, so the multiprocessor that has to read most ends last. Of x each program
    # reads all rows.
    per_sm = {
        size: triton.cdiv(outputs // size, num_sms) for size in (64, 32, 16) if outputs % size == 0
    }
    block_outputs = min(per_sm, key=lambda size: per_sm[size] * (size + padded_rows))
    # A tile of 16 KiB. Memory needs about 44 KiB in flight per multiprocessor (4.8 TB/s for 1.2 us
    # over 132 of them); a program that is alone there needs more, as it also waits for itself.
    block_inputs = min(inputs & -inputs, 8192 // block_outputs)
    num_stages = {1: 6, 2: 4}.get(per_sm[block_outputs], 3)
    return LaunchShape(
        uses_dot=True,
        padded_rows=padded_rows,
        block_outputs=block_outputs,
        block_inputs=block_inputs,
        num_warps=4 if block_outputs > 16 else 2,  # a warp's share is 16 x 8 sums or more
        num_stages=num_stages,
    )


def _fma_shape(outputs: int, inputs: int, num_sms: int) -> LaunchShape:
    # The sums of 8 x 1024 weights fill the registers of four warps, and a multiprocessor holds four
    # such programs. Where not all can run at once, half as large ones: more of them run together,
    # and the last ones leave the memory idle for less long.
    block_inputs = min(inputs & -inputs, 1024)
    run_at_once = outputs * block_inputs <= 4 * num_sms * 8192
    size = 8192 if run_at_once else 4096
    return LaunchShape(
        uses_dot=False,
        padded_rows=_FMA_ROWS,
        block_outputs=max(2, min(outputs & -outputs, size // block_inputs)),
        block_inputs=block_inputs,
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _weight_rows(outputs, OUT: tl.constexpr, IS_SWIGLU: tl.constexpr):
    # For SwiGLU rows of gate and up take turns, so that both of an output are in the same tile.
    row = tl.program_id(0) * OUT + tl.arange(0, OUT)
    if IS_SWIGLU:
        row = row // 2 + row % 2 * (outputs // 2)
    return row.to(tl.int64)


@triton.jit
def _store(
    out_ptr,
    sums,
    num_rows,
    outputs,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    value = sums.to(dtype)  # [ROWS, OUT]
    width = outputs
    SIZE: tl.constexpr = OUT // 2 if IS_SWIGLU else OUT
    if IS_SWIGLU:
        # Rounded where the steps one by one round.
        gate, up = tl.split(tl.reshape(value, (ROWS, SIZE, 2)))
        gate = gate.to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        value = (gate * up.to(tl.float32)).to(dtype)
        width = outputs // 2
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + row * width + column, value, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _fma_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):
    row_ptrs = weight_ptr + _weight_rows(outputs, OUT, IS_SWIGLU) * inputs
    # [ROWS, OUT, IN] from the start, or Triton would move weights between threads.
    column = tl.arange(0, IN)[None, None, :]
    row = tl.arange(0, ROWS)[:, None, None]
    weight_ptrs = row_ptrs[None, :, None] + column
    x_ptrs = x_ptr + row * inputs + column
    live = row < num_rows
    weight = tl.load(weight_ptrs)
    pdl.wait(PDL)
    x = tl.load(x_ptrs, mask=live, other=0.0)
    acc = weight.to(tl.float32) * x.to(tl.float32)
    for at in tl.range(IN, inputs, IN, num_stages=STAGES):
        weight = tl.load(weight_ptrs + at)
        x = tl.load(x_ptrs + at, mask=live, other=0.0)
        acc += weight.to(tl.float32) * x.to(tl.float32)
    _store(out_ptr, tl.sum(acc, 2), num_rows, outputs, ROWS, OUT, IS_SWIGLU)


@triton.jit(do_not_specialize=["num_rows"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STAGES: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):
    row_ptrs = weight_ptr + _weight_rows(outputs, OUT, IS_SWIGLU) * inputs
    column = tl.arange(0, IN)
    row = tl.arange(0, ROWS)[None, :]
    weight_ptrs = row_ptrs[:, None] + column[None, :]
    x_ptrs = x_ptr + row * inputs + column[:, None]
    live = row < num_rows
    # Weights are the left operand: it comes in sixteens at least, the right one, x, in eights.
    acc = tl.zeros((OUT, ROWS), tl.float32)
    # Asking for weights before this, into registers or only into the L2 cache, was slower.
    pdl.wait(PDL)
    for at in tl.range(0, inputs, IN, num_stages=STAGES):
        weight = tl.load(weight_ptrs + at)
        x = tl.load(x_ptrs + at, mask=live, other=0.0)
        acc = tl.dot(weight, x, acc)
    _store(out_ptr, tl.trans(acc), num_rows, outputs, ROWS, OUT, IS_SWIGLU)


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` and `linear_swiglu` take these; x [.., inputs] fits the weight.

    They have no gradients. On a CPU they run through Triton's interpreter, in tests.
    """
    return (
        0 < x.numel() <= MAX_ROWS * weight.shape[1]
        and x.dtype == weight.dtype
        and x.is_contiguous()
        # Where a start were not aligned, Triton would compile kernels that load number by number.
        and x.data_ptr() % 16 == 0
        and not why_not(weight)
    )


def why_not(weight: Tensor) -> str:
    """Return why products with this weight [outputs, inputs] are never ours; empty if they are."""
    outputs, inputs = weight.shape
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"weights are {weight.dtype}, not of 16 bits"
    if outputs > MAX_OUTPUTS:
        return f"{outputs} outputs are as many as a vocabulary has"
    if outputs % 16 or inputs % 128:
        return f"{outputs} outputs or {inputs} inputs are no multiples of 16 and 128"
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return "weights are not contiguous, or not aligned"
    if _room(weight.device)[1] < _SHARED_MEMORY:
        return f"a multiprocessor of this GPU shares less than {_SHARED_MEMORY >> 10} KiB"
    return ""


def linear(x: Tensor, weight: Tensor, shape: LaunchShape | None = None) -> Tensor:
    """Return x W^T, [.., outputs], of x [.., inputs]; summed in fp32 and rounded once.

    Args:
        x: `can_run` says what it and the weight may be.
        weight: [outputs, inputs].
        shape: of the launch; None: `launch_shape` chooses.
    """
    return _launch(x, weight, shape, is_swiglu=False)


def linear_swiglu(x: Tensor, weight: Tensor, shape: LaunchShape | None = None) -> Tensor:
    """Return `layers.swiglu` of `linear`, [.., outputs / 2]; the same rounding, in one kernel."""
    return _launch(x, weight, shape, is_swiglu=True)


def _launch(x: Tensor, weight: Tensor, shape: LaunchShape | None, *, is_swiglu: bool) -> Tensor:
    outputs, inputs = weight.shape
    num_rows = x.numel() // inputs
    if shape is None:
        num_sms = _room(x.device)[0]
        shape = launch_shape(num_rows=num_rows, outputs=outputs, inputs=inputs, num_sms=num_sms)
    assert num_rows <= shape.padded_rows, "the shape is for fewer rows"
    assert outputs % shape.block_outputs == 0 and inputs % shape.block_inputs == 0, "ragged tiles"
    options = pdl.launch_options(x) if shape.overlaps else {"PDL": False}
    out = x.new_empty((*x.shape[:-1], outputs // 2 if is_swiglu else outputs))
    kernel = _dot_kernel if shape.uses_dot else _fma_kernel
    kernel[(outputs // shape.block_outputs,)](
        x,
        weight,
        out,
        num_rows,
        outputs,
        inputs,
        ROWS=shape.padded_rows,
        OUT=shape.block_outputs,
        IN=shape.block_inputs,
        STAGES=shape.num_stages,
        IS_SWIGLU=is_swiglu,
        num_warps=shape.num_warps,
        **options,
    )
    return out


@functools.cache
def _room(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory of one."""
    if device.type != "cuda":
        return 1, _SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_multiprocessor
