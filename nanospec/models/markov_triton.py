"""The greedy step of a Markov head in two launches; its specification is `DSparkDrafter.correct`.

The correction is added to the logits and searched where it is computed. Nothing of size V is
written, and what is read is w2, once, and the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec import pdl

_TILE_BYTES = 32 * 1024  # of w2 or of vectors, in a program
_MAX_ROW_BYTES = 1024  # of w2; fp32 is multiplied without tensor cores, from registers


def fits(weight: Tensor) -> bool:
    """Return whether the step of a head with this w2 [V, r] can be taken here."""
    rank = weight.shape[1]
    is_power = rank & (rank - 1) == 0
    return is_power and rank >= 16 and rank * weight.element_size() <= _MAX_ROW_BYTES


# Numbers that change from round to round are not specialised on, nor is where a column starts: no
# round waits for a compiler. The stride of the logits is a multiple of V, which does not change.
@triton.jit(
    do_not_specialize=["num_rows", "index_stride"], do_not_specialize_on_alignment=["index_ptr"]
)
def _search_kernel(
    base_ptr,
    vectors_ptr,
    index_ptr,
    weight_ptr,
    best_ptr,
    token_ptr,
    num_rows,
    vocab_size,
    base_stride,
    index_stride,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program searches a stretch of the vocabulary for all rows, ROWS of them at a time.
    first_token = tl.program_id(0) * TOKENS
    lane = tl.arange(0, TOKENS)
    inside = first_token + lane < vocab_size
    token = tl.minimum(first_token + lane, vocab_size - 1).to(tl.int64)
    weight = tl.load(weight_ptr + token[None, :] * RANK + tl.arange(0, RANK)[:, None])
    pdl.wait(PDL)
    vectors = _vectors(vectors_ptr, index_ptr, 0, num_rows, index_stride, RANK, ROWS)
    # Masked here, not when loading: the first use of weights is what waits for them, and by now the
    # vectors are on their way, too.
    weight = tl.where(inside[None, :], weight, 0.0)
    for first_row in tl.range(0, num_rows, ROWS, num_stages=1):
        row = first_row + tl.arange(0, ROWS).to(tl.int64)
        live = row < num_rows
        base_at = base_ptr + row[:, None] * base_stride + first_token + lane[None, :]
        base = tl.load(base_at, mask=live[:, None] & inside[None, :], other=-float("inf"))
        following = _vectors(
            vectors_ptr, index_ptr, first_row + ROWS, num_rows, index_stride, RANK, ROWS
        )
        # Rounded where torch rounds: the product has the weights' dtype, its sum with base fp32.
        bias = tl.dot(vectors, weight, input_precision="ieee").to(weight_ptr.dtype.element_ty)
        logits = base.to(tl.float32) + bias.to(tl.float32)
        best, at = tl.max(logits, 1, return_indices=True)  # the first one among equals
        to = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(best_ptr + to, best, mask=live)
        tl.store(token_ptr + to, first_token + at, mask=live)
        vectors = following


@triton.jit
def _vectors(
    vectors_ptr,
    index_ptr,
    first_row,
    num_rows,
    index_stride,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # [ROWS, RANK], 0 behind the last row.
    row = first_row + tl.arange(0, ROWS).to(tl.int64)
    live = row < num_rows
    index = row
    if index_ptr is not None:
        index = tl.load(index_ptr + row * index_stride, mask=live, other=0)
    at = vectors_ptr + index[:, None] * RANK + tl.arange(0, RANK)[None, :]
    return tl.load(at, mask=live[:, None], other=0.0)


@triton.jit(do_not_specialize=["out_stride"], do_not_specialize_on_alignment=["out_ptr"])
def _choose_kernel(
    best_ptr,
    token_ptr,
    out_ptr,
    num_stretches,
    vocab_size,
    out_stride,
    STRETCHES: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program per row. Tokens rise with stretches: the first among equals is the smallest.
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.arange(0, STRETCHES)
    there = stretch < num_stretches
    pdl.wait(PDL)
    at = row * num_stretches + stretch
    best = tl.load(best_ptr + at, mask=there, other=-float("inf"))
    token = tl.load(token_ptr + at, mask=there, other=vocab_size)
    first = tl.min(tl.where(best == tl.max(best, 0), token, vocab_size), 0)
    # Of nan none equals the largest. It may choose anything, but nothing outside of a table.
    tl.store(out_ptr + row * out_stride, tl.minimum(first, vocab_size - 1).to(tl.int64))


def greedy_tokens(
    base: Tensor, vectors: Tensor, index: Tensor | None, weight: Tensor, out: Tensor
) -> None:
    """Write the argmax of base + vectors[index] @ weight^T, row by row; the first among equals.

    Args:
        base: [N, V], the rows of any stride.
        vectors: [.., r], of the weight's dtype.
        index: [N] int64, of any stride: which vector is each row's; None: the first N, in order.
        weight: [V, r], one that `fits`.
        out: [N] int64, of any stride.
    """
    num_rows, vocab_size = base.shape
    assert fits(weight) and weight.is_contiguous(), "the caller asks first"
    assert base.stride(1) == 1, "logits of a row follow each other"
    if num_rows == 0:
        return
    rank = weight.shape[1]
    rows, tokens, num_warps = _tile(num_rows, rank * weight.element_size())
    num_stretches = triton.cdiv(vocab_size, tokens)
    best = torch.empty(num_rows, num_stretches, dtype=torch.float32, device=base.device)
    token = torch.empty(num_rows, num_stretches, dtype=torch.int32, device=base.device)
    _search_kernel[(num_stretches,)](
        base,
        vectors.contiguous(),
        index,
        weight,
        best,
        token,
        num_rows,
        vocab_size,
        base.stride(0),
        0 if index is None else index.stride(0),
        RANK=rank,
        ROWS=rows,
        TOKENS=tokens,
        num_warps=num_warps,
        **pdl.launch_options(base),
    )
    _choose_kernel[(num_rows,)](
        best,
        token,
        out,
        num_stretches,
        vocab_size,
        out.stride(0),
        STRETCHES=triton.next_power_of_2(num_stretches),
        num_warps=8,
        **pdl.launch_options(base),
    )


def _tile(num_rows: int, row_bytes: int) -> tuple[int, int, int]:
    """Return how many vectors and tokens a program multiplies at a time, and its warps.

    Args:
        num_rows: N.
        row_bytes: of a row of w2.
    """
    most = _TILE_BYTES // row_bytes
    if num_rows <= 32:
        # Reading w2 is all that takes long: programs are small, for many to read at the same time.
        # 32, as measured: 41 us in place of 47; from 33 on one tile no longer holds all vectors.
        return max(triton.next_power_of_2(num_rows), 16), min(most, 128), 4  # 16: for tl.dot
    # Every program reads all vectors: programs are large, for few to do so.
    return min(most, 64), min(2 * most, 128), 4
