"""Triton versions of `kv_ops`; each function has the contract of its namesake there."""

import triton
import triton.language as tl
from torch import Tensor


# What changes from round to round is not specialised on: no round waits for a compiler.
@triton.jit(
    do_not_specialize=["max_rows"],
    do_not_specialize_on_alignment=["src_ptr", "dst_ptr", "counts_ptr"],
)
def _move_kv_kernel(
    cache_ptr, src_ptr, dst_ptr, counts_ptr, stride_layer, width, max_rows, BLOCK: tl.constexpr
):
    # One program walks one request in order, a part of each row at a time. Row by row no slot is
    # written before it was read, as targets are not after their sources; splitting a request over
    # programs by rows would lose that.
    layer, request = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = cache_ptr + layer * stride_layer + columns
    count = tl.load(counts_ptr + request)
    for row in range(0, count):
        src = tl.load(src_ptr + request * max_rows + row)
        dst = tl.load(dst_ptr + request * max_rows + row)
        if src != dst:
            value = tl.load(base + src * width, mask=columns < width)
            tl.store(base + dst * width, value, mask=columns < width)


def move_kv(cache: Tensor, src: Tensor, dst: Tensor, counts: Tensor) -> None:
    """See `kv_ops.move_kv`. Rows need not be powers of two (SmolLM2: 192 numbers)."""
    num_layers, _, heads, dim = cache.shape
    num_reqs, max_rows = src.shape
    block = min(triton.next_power_of_2(heads * dim), 1024)
    grid = (num_layers, num_reqs, triton.cdiv(heads * dim, block))
    _move_kv_kernel[grid](
        cache, src, dst, counts, cache.stride(0), heads * dim, max_rows, BLOCK=block
    )
