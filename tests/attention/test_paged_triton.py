"""The kernel that plans nothing on the host equals the torch backend, whatever the lengths."""

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nanospec.attention import mask
from nanospec.attention.batch import ForwardBatch, build_batch, slots_of
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.torch_backend import TorchAttention
from tests import helpers

PADDING = 3  # rows after the last segment
CANARY = 7.0
KINDS = {"causal": (3, 0), "full": (3, 0), "masked": (0, 3), "mixed": (2, 2)}


def make_batch(
    cache: PagedKVCache,
    qo_lens: Sequence[int],
    contexts: Sequence[int],
    *,
    words: Tensor | None = None,
    num_masked: int = 0,
) -> ForwardBatch:
    """Return segments of these rows after contexts of these lengths, on shuffled pages."""
    device, size = cache.k.device, cache.page_size
    free = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    kv_lens = [rows + context for rows, context in zip(qo_lens, contexts, strict=True)]
    tables = [[free.pop() for _ in range(-(-kv_len // size))] for kv_len in kv_lens]
    spans = [range(*span) for span in zip(contexts, kv_lens, strict=True)]
    pairs = zip(tables, spans, strict=True)
    slots = [slot for pages, span in pairs for slot in slots_of(pages, span, size)]
    at = torch.tensor(slots, dtype=torch.int64, device=device)
    if words is not None:
        words = torch.cat((at.new_zeros(len(at) - len(words)), words))
    masks = {"num_masked": num_masked, "words": words}
    return build_batch(at, at, at, list(qo_lens), kv_lens, tables, at[:0], **masks)


def pages_of(batch: ForwardBatch, page_size: int) -> list[list[int]]:
    """Return the pages each segment needs."""
    tables = zip(batch.page_tables.tolist(), batch.lens()[1], strict=True)
    return [table[: -(-kv_len // page_size)] for table, kv_len in tables]


def attend_by_torch(
    cache: PagedKVCache, batch: ForwardBatch, num_heads: int
) -> tuple[Tensor, Tensor]:
    """Return random queries and what torch makes of them; the cache holds the rows' keys then."""
    device, dtype, dim = cache.k.device, cache.k.dtype, cache.head_dim
    generator = torch.Generator(device).manual_seed(1)
    shape = (batch.num_tokens, num_heads + 2 * cache.num_kv_heads, dim)
    rows = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    q, k, v = rows.split([num_heads, cache.num_kv_heads, cache.num_kv_heads], dim=1)
    attention = TorchAttention(cache)
    attention.begin(batch)
    out = attention.attend(0, q.contiguous(), k, v)
    # What belongs to no segment poisons every sum that it gets into.
    used = [
        slot
        for pages, kv_len in zip(pages_of(batch, cache.page_size), batch.lens()[1], strict=True)
        for slot in slots_of(pages, range(kv_len), cache.page_size)
    ]
    unused = torch.ones(cache.k.shape[1], dtype=torch.bool, device=device)
    unused[used] = False
    cache.k[:, unused] = cache.v[:, unused] = float("nan")
    return q, out


def words_of(batch: ForwardBatch) -> Tensor:
    """Return [T + padding] words, 0 for rows that are causal; own bits are left out if possible."""
    words = batch.slots.new_full((batch.num_tokens + PADDING,), -1)
    words[: batch.num_tokens] = 0
    if batch.words is not None:
        masked = batch.words[batch.words != 0]
        own = [1 << row for rows in batch.lens()[0][batch.num_unmasked :] for row in range(rows)]
        own = [bit - (bit >> 63 << 64) for bit in own]  # as a signed number
        without = masked & ~batch.slots.new_tensor(own)
        first = batch.num_tokens - len(masked)
        words[first : batch.num_tokens] = torch.where(without == 0, masked, without)
    return words


def attend(
    cache: PagedKVCache,
    batch: ForwardBatch,
    q: Tensor,
    *,
    has_words: bool = True,
    num_splits: int = 1,
    packed: int = 32,
    block_keys: int = 16,
) -> Tensor:
    """Return what the kernel writes, padding cut off; it must not use anything poisoned here."""
    from nanospec.attention import launch, paged_triton

    num_rows, num_heads, dim = q.shape
    num_reqs, device = batch.num_reqs, q.device
    block_rows = packed // (num_heads // cache.num_kv_heads)
    shape = launch.LaunchShape(
        block_rows=block_rows,
        block_keys=block_keys,
        num_splits=num_splits,
        num_warps=4,
        num_stages=3,
    )
    # Not every stride is that of a contiguous tensor.
    padded = q.new_full((num_rows + PADDING, num_heads + 1, dim), float("nan"))[:, 1:]
    padded[:num_rows] = q
    out = torch.full(padded.shape, CANARY, dtype=q.dtype, device=device)
    on_device = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    qo_indptr, kv_lens = batch.qo_indptr, batch.kv_lens
    own_pages = pages_of(batch, cache.page_size)
    width = max(map(len, own_pages)) + 2
    garbage = [2**30, -5]
    tables = [pages + garbage * width for pages in own_pages]
    num_tiles = launch.num_tiles(len(out), num_reqs, block_rows)
    tiles = on_device([[-2] * num_tiles] * paged_triton.TILE_FIELDS)
    size = launch.scratch_size(
        num_rows=len(out), num_heads=num_heads, head_dim=dim, num_splits=num_splits
    )
    paged_triton.tile_segments(tiles, qo_indptr=qo_indptr, kv_lens=kv_lens, block_rows=block_rows)
    paged_triton.paged_attention(
        padded,
        cache.k[0],
        cache.v[0],
        out,
        tiles=tiles,
        qo_indptr=qo_indptr,
        page_tables=on_device([table[:width] for table in tables]),
        words=words_of(batch) if has_words else None,
        page_size=cache.page_size,
        is_full=batch.is_full,
        shape=shape,
        scratch=torch.full((size,), float("nan"), device=device),
    )
    assert (out[num_rows:] == CANARY).all()
    return out[:num_rows]


def new_cache(device: torch.device, page_size: int, **options: object) -> PagedKVCache:
    return helpers.new_cache(
        400 // page_size, page_size, **({"device": device, "head_dim": 16} | options)
    )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("page_size", "num_heads", "num_splits"), [(1, 8, 1), (3, 2, 2), (16, 6, 5)]
)
def test_random_segments_match_the_torch_backend(
    device: torch.device, kind: str, page_size: int, num_heads: int, num_splits: int
) -> None:
    cache = new_cache(device, page_size)
    num_plain, num_masked = KINDS[kind]
    seed = page_size + num_heads
    batch = helpers.random_batch(
        seed, cache, num_plain=num_plain, num_masked=num_masked, is_full=kind == "full"
    )
    q, want = attend_by_torch(cache, batch, num_heads)
    got = attend(cache, batch, q, has_words=num_masked > 0, num_splits=num_splits)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_chunk_of_many_tiles_runs_beside_decoding_and_trees(
    device: torch.device, num_splits: int
) -> None:
    cache = new_cache(device, 3)
    visible = torch.rand(6, 6, generator=torch.Generator().manual_seed(2)) < 0.5
    words = mask.pack_words(visible.tril()).to(device)
    # More rows than a word has bits: causal, although there are words.
    lens = [70, 1, 0, 1, 0, 6], [3, 33, 9, 0, 0, 20]
    batch = make_batch(cache, *lens, words=words, num_masked=1)
    q, want = attend_by_torch(cache, batch, 6)
    got = attend(cache, batch, q, num_splits=num_splits, packed=64, block_keys=32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_tree_of_64_rows_uses_every_bit_of_its_words(device: torch.device) -> None:
    cache = new_cache(device, 16, num_kv_heads=1)
    visible = torch.rand(64, 64, generator=torch.Generator().manual_seed(3)) < 0.3
    words = mask.pack_words(visible).to(device)  # of later rows, too
    batch = make_batch(cache, [64], [21], words=words, num_masked=1)
    q, want = attend_by_torch(cache, batch, 1)
    got = attend(cache, batch, q, num_splits=2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "num_heads"), [(32, 4), (64, 9), (128, 8)])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        # Triton's interpreter multiplies the bit patterns of bfloat16 (seen in 3.9).
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_wide_heads_in_16_bits_match_the_torch_backend(
    device: torch.device, head_dim: int, num_heads: int, dtype: torch.dtype
) -> None:
    num_kv_heads = 3 if num_heads == 9 else 2
    options = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    cache = new_cache(device, 16, **options)
    batch = helpers.random_batch(head_dim, cache, num_plain=2, num_masked=2)
    q, want = attend_by_torch(cache, batch, num_heads)
    got = attend(cache, batch, q, num_splits=2, block_keys=32)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_splits", [1, 5])
def test_rows_do_not_depend_on_other_segments(device: torch.device, num_splits: int) -> None:
    cache = new_cache(device, 3)
    batch = helpers.random_batch(4, cache, num_plain=3)
    q, _ = attend_by_torch(cache, batch, 6)
    together = attend(cache, batch, q, num_splits=num_splits)
    start = 0
    for index, (num_rows, kv_len) in enumerate(zip(*batch.lens(), strict=True)):
        rows = slice(start, start + num_rows)
        start += num_rows
        at, pages = batch.slots[rows], pages_of(batch, 3)[index]
        one = build_batch(at, at, at, [num_rows], [kv_len], [pages], at[:0])
        alone = attend(cache, one, q[rows], num_splits=num_splits)
        torch.testing.assert_close(together[rows], alone, rtol=0, atol=0)


def test_a_row_is_the_same_verified_or_decoded(device: torch.device) -> None:
    cache = new_cache(device, 16)
    batch = make_batch(cache, [8], [37])
    q, _ = attend_by_torch(cache, batch, 8)
    verified = attend(cache, batch, q)
    for row in range(8):
        slot = batch.slots[row : row + 1]
        one = build_batch(slot, slot, slot, [1], [38 + row], batch.page_tables.tolist(), slot[:0])
        decoded = attend(cache, one, q[row : row + 1], num_splits=2, packed=16)
        torch.testing.assert_close(verified[row : row + 1], decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("block_rows", [1, 5])
def test_tiles_hold_every_row_once_and_the_longest_first(
    device: torch.device, seed: int, block_rows: int
) -> None:
    from nanospec.attention import launch, paged_triton

    generator = torch.Generator().manual_seed(seed)
    qo_lens = torch.randint(0, 40, (140,), generator=generator)
    qo_lens *= torch.rand(140, generator=generator) < 0.6
    kv_lens = qo_lens + torch.randint(0, 99, (140,), generator=generator)
    qo_indptr = torch.cat([qo_lens.new_zeros(1), qo_lens.cumsum(0)])
    num_tiles = launch.num_tiles(int(qo_indptr[-1]), 140, block_rows)
    tiles = torch.full((5, num_tiles), 99, dtype=torch.int32, device=device)
    paged_triton.tile_segments(
        tiles,
        qo_indptr=qo_indptr.to(device, torch.int32),
        kv_lens=kv_lens.to(device, torch.int32),
        block_rows=block_rows,
    )
    want = [
        (segment, first, int(qo_indptr[segment]), int(qo_lens[segment]), int(kv_lens[segment]))
        for segment in sorted(range(140), key=lambda index: -int(kv_lens[index]))
        for first in range(0, int(qo_lens[segment]), block_rows)
    ]
    got = list(zip(*tiles.tolist(), strict=True))
    assert got[: len(want)] == want
    assert all(tile[0] == -1 for tile in got[len(want) :])


@pytest.mark.parametrize(
    ("num_reqs", "max_rows", "group", "block_rows", "num_splits"),
    [
        (1, 1, 4, 4, 32),  # decoding: padded to the 16 rows of a tensor core
        (1, 8, 4, 8, 32),  # verification: one tile of 32
        (8, 8, 4, 16, 2),
        (32, 8, 4, 16, 1),
        (256, 1, 4, 4, 1),
        (8, 8, 3, 21, 2),  # 63 of 64 rows are used
        (1, 16, 4, 16, 32),
        (1, 2048, 4, 16, 1),  # a chunk: tiles enough without splits
        (4, 1, 4, 4, 4),
        (256, 8, 4, 8, 1),  # many small programs hide each other's waits
        (1, 4, 71, 1, 4),  # more query heads than a tile has rows otherwise
    ],
)
def test_launches_fill_the_gpu_without_needless_splits(
    num_reqs: int, max_rows: int, group: int, block_rows: int, num_splits: int
) -> None:
    from nanospec.attention import launch

    shape = launch.launch_shape(
        num_rows=num_reqs * max_rows,
        num_reqs=num_reqs,
        max_rows=max_rows,
        num_heads=8 * group,
        num_kv_heads=8,
        num_sms=132,
    )
    assert (shape.block_rows, shape.num_splits) == (block_rows, num_splits)


# Found in a graph of 8 rows, which may be eight requests: one with eight rows had too few splits.
@pytest.mark.parametrize("num_reqs", [1, 2, 8, 16, 32, 256])
def test_graphs_launch_for_segments_as_long_as_plans(num_reqs: int) -> None:
    from nanospec.attention import launch

    heads = {"num_heads": 32, "num_kv_heads": 8, "num_sms": 132}
    num_rows = 8 * num_reqs
    own, in_graph = (
        launch.launch_shape(num_rows=num_rows, num_reqs=count, max_rows=8, **heads)
        for count in (num_reqs, min(num_rows, 256))
    )
    assert own == in_graph


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_captured_graph_follows_lengths_and_pages(num_splits: int) -> None:
    from nanospec.attention import launch, paged_triton

    device = torch.device("cuda", 0)
    cache = new_cache(device, 16, head_dim=64)
    batches = [
        make_batch(cache, *lens) for lens in (([1, 8, 3], [40, 9, 0]), ([5, 0, 7], [3, 99, 70]))
    ]
    block_rows, num_rows = 4, 12
    q = torch.randn(num_rows, 8, 64, device=device)
    out = torch.empty_like(q)
    shape = launch.LaunchShape(
        block_rows=block_rows, block_keys=32, num_splits=num_splits, num_warps=4, num_stages=3
    )
    size = launch.scratch_size(num_rows=12, num_heads=8, head_dim=64, num_splits=num_splits)
    scratch = torch.empty(size, device=device)
    num_tiles = launch.num_tiles(num_rows, 3, block_rows)
    ints = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    tiles, indptr, kv_lens, tables = ints(5, num_tiles), ints(4), ints(3), ints(3, 10)

    def run() -> None:
        paged_triton.tile_segments(tiles, qo_indptr=indptr, kv_lens=kv_lens, block_rows=block_rows)
        paged_triton.paged_attention(
            q,
            cache.k[0],
            cache.v[0],
            out,
            tiles=tiles,
            qo_indptr=indptr,
            page_tables=tables,
            words=None,
            page_size=16,
            is_full=False,
            shape=shape,
            scratch=scratch,
        )

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for batch in batches:
        indptr.copy_(batch.qo_indptr)
        kv_lens.copy_(batch.kv_lens)
        tables[:, : batch.page_tables.shape[1]] = batch.page_tables
        out.fill_(CANARY)
        graph.replay()
        rows = q[: batch.num_tokens]
        want = attend(cache, batch, rows, has_words=False, num_splits=1)
        torch.testing.assert_close(out[: batch.num_tokens], want, rtol=1e-5, atol=1e-5)
        assert (out[batch.num_tokens :] == CANARY).all()
