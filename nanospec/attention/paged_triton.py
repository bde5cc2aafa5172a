"""Attention over the paged cache that needs no plan from the host, made for CUDA graphs.

Every length is read on the device; launches depend only on sizes that a graph fixes anyway. Once
per forward `tile_segments` lists the tiles of rows, then `paged_attention` runs once per layer. The
specification is `torch_backend`.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from nanospec import pdl
from nanospec.attention.launch import LaunchShape
from nanospec.attention.mask import MAX_MASKED_ROWS

# Of a tile: segment or -1; its first row in the segment; segment's first row of all, rows, keys.
TILE_FIELDS = 5


# Numbers that change from round to round are not specialised on: no round waits for a compiler.
# Nor is the start of a buffer that may be a slice of another.
@triton.jit(
    do_not_specialize=["num_reqs", "num_tiles", "block_rows"],
    do_not_specialize_on_alignment=["tiles_ptr", "qo_indptr_ptr", "kv_lens_ptr"],
)
def _tile_kernel(
    tiles_ptr, qo_indptr_ptr, kv_lens_ptr, num_reqs, num_tiles, block_rows, LANES: tl.constexpr
):
    # One program per segment adds up the tiles of those before it: those with more keys, and those
    # with as many and a lower number. The longest start first, so that none is left running alone.
    # One more program comes after all of them and marks the tiles that nobody owns.
    request = tl.program_id(0)
    is_last = request == num_reqs
    mine = tl.minimum(request, num_reqs - 1)
    start_row = tl.load(qo_indptr_ptr + mine)
    num_rows = tl.load(qo_indptr_ptr + mine + 1) - start_row
    kv_len = tl.load(kv_lens_ptr + mine)
    first_tile = 0
    for at in range(0, num_reqs, LANES):
        other = at + tl.arange(0, LANES)
        live = other < num_reqs
        start = tl.load(qo_indptr_ptr + other, mask=live, other=0)
        stop = tl.load(qo_indptr_ptr + other + 1, mask=live, other=0)
        keys = tl.load(kv_lens_ptr + other, mask=live, other=0)
        is_before = is_last | (keys > kv_len) | ((keys == kv_len) & (other < request))
        tiles = (stop - start + block_rows - 1) // block_rows
        first_tile += tl.sum(tl.where(is_before, tiles, 0))
    count = (num_rows + block_rows - 1) // block_rows
    if is_last:
        count = num_tiles - first_tile
        request = -1
    for at in range(0, count, LANES):
        index = at + tl.arange(0, LANES)
        live = index < count
        to = tiles_ptr + first_tile + index
        tl.store(to, request, mask=live)
        tl.store(to + num_tiles, index * block_rows, mask=live)
        tl.store(to + 2 * num_tiles, start_row, mask=live)
        tl.store(to + 3 * num_tiles, num_rows, mask=live)
        tl.store(to + 4 * num_tiles, kv_len, mask=live)


def tile_segments(tiles: Tensor, *, qo_indptr: Tensor, kv_lens: Tensor, block_rows: int) -> None:
    """List the tiles of a forward, for all its layers.

    A tile repeats the lengths of its segment, or attention would wait for memory once more.

    Args:
        tiles: [`TILE_FIELDS`, `num_tiles(T, R, block_rows)`] int32, contiguous, to be written.
        qo_indptr: [R + 1] int32, where each segment's rows start, and the end; at most T.
        kv_lens: [R] int32, keys each segment sees, its own rows included.
        block_rows: of the launch shape.
    """
    num_reqs = len(kv_lens)
    _tile_kernel[(num_reqs + 1,)](
        tiles, qo_indptr, kv_lens, num_reqs, tiles.shape[1], block_rows, LANES=128
    )


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["tiles_ptr", "tables_ptr", "words_ptr"],
)
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    tiles_ptr,
    tables_ptr,
    words_ptr,
    scale,
    stride_row,
    stride_head,
    stride_slot,
    table_width,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    KEYS: tl.constexpr,
    WORD_ROWS: tl.constexpr,
    IS_FULL: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads and splits of a tile are neighbours in the grid: they read neighbouring memory, and the
    # long tiles, which come first, start first in all heads.
    kv_head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_tiles = tl.num_programs(2)
    pdl.wait(PDL)
    segment = tl.load(tiles_ptr + tile)
    first = tl.load(tiles_ptr + num_tiles + tile)
    start_row = tl.load(tiles_ptr + 2 * num_tiles + tile)
    num_rows = tl.load(tiles_ptr + 3 * num_tiles + tile)
    kv_len = tl.load(tiles_ptr + 4 * num_tiles + tile)
    if segment < 0:
        return
    context = kv_len - num_rows

    # Row a of the tile with query head b of the KV head is packed row a * GROUP + b. Packed rows up
    # to the power of two, and past the segment's end, are computed and not stored.
    packed = tl.arange(0, PACKED)
    row = first + packed // GROUP  # of the segment
    live = (packed < ROWS * GROUP) & (row < num_rows)
    head = kv_head * GROUP + packed % GROUP
    at_row = (start_row + row).to(tl.int64)

    # Every row of the tile sees the keys before `seen`, none sees those from `end` on. Where words
    # are possible this does not wait for them: they reach the end of the segment.
    seen = context + first + 1
    end = context + tl.minimum(first + ROWS, num_rows)
    if IS_FULL:
        seen = kv_len
        end = kv_len
    elif WORD_ROWS > 0:
        word = tl.load(words_ptr + at_row, mask=live, other=0)
        if num_rows <= WORD_ROWS:
            seen = context
            end = kv_len

    # The stretch of a split depends on the segment alone: other segments never change a sum.
    begin = 0
    if IS_SPLIT:
        num_splits = tl.num_programs(1)
        steps = ((kv_len + KEYS - 1) // KEYS + num_splits - 1) // num_splits
        begin = split * steps * KEYS
        end = tl.minimum(end, begin + steps * KEYS)

    dim = tl.arange(0, DIM)
    q_at = at_row * stride_row + head * stride_head
    q = tl.load(q_ptr + q_at[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    table_ptr = tables_ptr + segment.to(tl.int64) * table_width
    best = tl.full((PACKED,), -float("inf"), tl.float32)
    total = tl.zeros((PACKED,), tl.float32)
    acc = tl.zeros((PACKED, DIM), tl.float32)
    # Pages are read a step before their keys are asked for. Reading them in the same step would
    # make Triton spend its stages on the pages, and only one step of keys would be in flight.
    ahead = begin + tl.arange(0, KEYS)
    page = tl.load(table_ptr + ahead // PAGE, mask=ahead < kv_len, other=0)
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        # Past the end neither table nor cache is read: what lies there could be NaN, which a weight
        # of zero does not hide.
        is_key = key < kv_len
        slot = page.to(tl.int64) * PAGE + key % PAGE
        from_slot = (slot * stride_slot)[:, None] + dim[None, :]
        ahead = key + KEYS
        page = tl.load(table_ptr + ahead // PAGE, mask=ahead < kv_len, other=0)
        k = tl.load(k_ptr + from_slot, mask=is_key[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if at + KEYS > seen:
            visible = is_key[None, :]
            if not IS_FULL:
                own = (key - context)[None, :]
                shown = own <= row[:, None]
                if WORD_ROWS > 0:
                    bit = (word[:, None] >> tl.minimum(tl.maximum(own, 0), 63)) & 1
                    by_word = (bit != 0) | (own < 0) | (own == row[:, None])
                    shown = tl.where((word != 0)[:, None], by_word, shown)
                visible = visible & shown
            score = tl.where(visible, score, -float("inf"))
        # A row may see no key of the stretch: then its best stays -inf and its total 0.
        new_best = tl.maximum(best, tl.max(score, 1))
        origin = tl.where(new_best == -float("inf"), 0.0, new_best)
        weight = tl.exp2(score - origin[:, None])
        fade = tl.exp2(best - origin)
        best = new_best
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(v_ptr + from_slot, mask=is_key[:, None], other=0.0)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc=acc, input_precision="ieee")

    divisor = tl.where(total > 0, total, 1.0)
    value = acc / divisor[:, None]
    at_out = at_row * (tl.num_programs(0) * GROUP) + head
    if IS_SPLIT:
        # The merge skips stretches whose logarithm is -inf, so those need no sums.
        at_out = at_out * tl.num_programs(1) + split
        tl.store(lse_ptr + at_out, best + tl.log2(divisor), mask=live)
        wanted = (live & (total > 0))[:, None]
        tl.store(partial_ptr + at_out[:, None] * DIM + dim[None, :], value, mask=wanted)
    else:
        value = value.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_out[:, None] * DIM + dim[None, :], value, mask=live[:, None])


@triton.jit(
    do_not_specialize=["num_reqs", "num_splits"],
    do_not_specialize_on_alignment=["qo_indptr_ptr"],
)
def _merge_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    qo_indptr_ptr,
    num_reqs,
    num_splits,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    pdl.wait(PDL)
    if row >= tl.load(qo_indptr_ptr + num_reqs):
        return
    at = row.to(tl.int64) * tl.num_programs(1) + head
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM)
    lse_at = at * num_splits + split
    lse = tl.load(lse_ptr + lse_at, mask=split < num_splits, other=-float("inf"))
    best = tl.max(lse, 0)  # -inf in rows of nobody, which see no key
    weight = tl.exp2(lse - tl.where(best == -float("inf"), 0.0, best))
    value = tl.load(
        partial_ptr + lse_at[:, None] * DIM + dim[None, :],
        mask=(lse > -float("inf"))[:, None],
        other=0.0,
    )
    total = tl.sum(weight, 0)
    merged = tl.sum(value * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + at * DIM + dim, merged.to(out_ptr.dtype.element_ty))


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    tiles: Tensor,
    qo_indptr: Tensor,
    page_tables: Tensor,
    words: Tensor | None,
    page_size: int,
    is_full: bool,
    shape: LaunchShape,
    scratch: Tensor,
) -> None:
    """Attend in one layer, whose keys and values are already in the cache.

    Every row sees the context of its segment, the keys before its rows. Inside the segment rows see
    all of it if `is_full`; else a word says what its row sees as in `attention.mask`, or, where it
    is 0, that the row sees itself and the rows before it.

    Args:
        q: [T, Hq, D], of any stride but the last.
        k: [S, Hkv, D], one layer of the cache; D is 16, 32, 64 or 128.
        v: [S, Hkv, D].
        out: [T, Hq, D] contiguous, to be written; rows past the last segment stay as they are.
        tiles: [`TILE_FIELDS`, number of tiles] int32, of `tile_segments`.
        qo_indptr: [R + 1] int32, as `tile_segments` got it.
        page_tables: [R, P] int32; what follows a segment's pages is never used.
        words: [T] int64; None if all are 0. Segments with others have at most 64 rows.
        page_size: tokens per page.
        is_full: whether rows see all of their segment; words do not count then.
        shape: the one whose `block_rows` the tiles have.
        scratch: [at least `scratch_size(..)`] fp32; anything may be in it.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    assert q.stride(2) == 1 and out.is_contiguous(), "rows of q, and out, must be contiguous"
    assert k.stride() == v.stride() and k.stride()[1:] == (head_dim, 1), "malformed cache"
    num_sums = num_rows * num_heads * shape.num_splits
    is_split = shape.num_splits > 1
    assert not is_split or scratch.numel() >= num_sums * (head_dim + 1), "too little scratch"
    partial, lse = scratch[: num_sums * head_dim], scratch[num_sums * head_dim :]
    if num_rows == 0:
        return
    has_words = words is not None and not is_full
    launch = pdl.launch_options(q)
    _attend_kernel[(num_kv_heads, shape.num_splits, tiles.shape[1])](
        q,
        k,
        v,
        out,
        partial if is_split else out,
        lse if is_split else out,
        tiles,
        page_tables,
        words if has_words else tiles,
        math.log2(math.e) * head_dim**-0.5,  # exp(x) is computed as exp2(x * log2(e))
        *(q.stride(0), q.stride(1), k.stride(0), page_tables.stride(0)),
        GROUP=group,
        DIM=head_dim,
        PAGE=page_size,
        ROWS=shape.block_rows,
        PACKED=max(16, triton.next_power_of_2(shape.block_rows * group)),
        KEYS=shape.block_keys,
        WORD_ROWS=MAX_MASKED_ROWS if has_words else 0,
        IS_FULL=is_full,
        IS_SPLIT=is_split,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **launch,
    )
    if is_split:
        sums = (out, partial, lse, qo_indptr, len(qo_indptr) - 1, shape.num_splits)
        lanes = triton.next_power_of_2(shape.num_splits)
        _merge_kernel[(num_rows, num_heads)](*sums, DIM=head_dim, SPLITS=lanes, **launch)
