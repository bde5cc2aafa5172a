"""FlashAttention 3 equals the torch backend; in a graph too, whatever lengths it replays."""

from dataclasses import replace

import pytest
import torch

from nanospec.attention.backend import AttentionBackend, create_attention
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.torch_backend import TorchAttention
from nanospec.cudagraph.buckets import fill_buffers
from nanospec.errors import BackendUnavailableError
from tests import helpers

KINDS = {"causal": (5, 0), "full": (5, 0), "masked": (0, 5), "mixed": (4, 4), "many": (40, 0)}
BFLOAT16 = torch.bfloat16


def new_flash3(cache: PagedKVCache, num_heads: int) -> AttentionBackend:
    try:
        return create_attention("flash3", cache, num_heads)
    except BackendUnavailableError as problem:
        pytest.skip(str(problem))


def new_cache(head_dim: int, page_size: int = 16, **options: object) -> PagedKVCache:
    device = torch.device("cuda", 0)
    sizes = {"num_pages": 8000 // page_size, "page_size": page_size, "head_dim": head_dim}
    return helpers.new_cache(device=device, **sizes, **({"dtype": BFLOAT16} | options))


def rows_of(
    cache: PagedKVCache, num_heads: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (
        torch.randn(num_rows, heads, cache.head_dim, device=cache.k.device, dtype=cache.k.dtype)
        for heads in (num_heads, cache.num_kv_heads, cache.num_kv_heads)
    )
    return q, k, v


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (32, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash3_matches_the_torch_backend(
    kind: str, page_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    cache = new_cache(head_dim, page_size, num_kv_heads=num_kv_heads)
    fast, slow = new_flash3(cache, num_heads), TorchAttention(cache)
    for seed in range(4):
        num_plain, num_masked = KINDS[kind]
        batch = helpers.random_batch(
            seed, cache, num_plain=num_plain, num_masked=num_masked, is_full=kind == "full"
        )
        rows = rows_of(cache, num_heads, batch.num_tokens)
        fast.begin(batch)
        got = fast.attend(0, *rows)
        slow.begin(batch)
        torch.testing.assert_close(got, slow.attend(0, *rows), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("max_rows", [1, 8])  # what a graph is captured for; chunks are longer
def test_a_captured_graph_follows_lengths_and_pages(max_rows: int) -> None:
    num_heads, num_rows, num_segments = 32, 512, 40
    cache = new_cache(128, num_kv_heads=8)
    fast, slow = new_flash3(cache, num_heads), TorchAttention(cache)
    q, k, v = rows_of(cache, num_heads, num_rows)
    integers = torch.zeros(num_rows, dtype=torch.int64, device=q.device)
    lengths = torch.zeros(num_segments + 1, dtype=torch.int32, device=q.device)
    buffers = ForwardBatch(
        *(integers.clone() for _ in range(3)),
        qo_indptr=lengths,
        kv_lens=lengths[1:].clone(),
        page_tables=lengths.new_zeros(num_segments, 30),
        logit_rows=integers[:0],
        max_rows=max_rows,
    )

    def run() -> torch.Tensor:
        fast.begin(buffers)
        return fast.attend(0, q, k, v)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(6):
        batch = helpers.random_batch(seed, cache, num_plain=6 * seed + 1)
        if seed % 2:  # one segment of 200 rows, as of a prompt
            batch = with_a_chunk(batch, cache, 200)
        fill_buffers(buffers, batch, cache.scratch_slot)
        graph.replay()
        slow.begin(batch)
        count = batch.num_tokens
        want = slow.attend(0, q[:count], k[:count], v[:count])
        torch.testing.assert_close(out[:count], want, rtol=2e-2, atol=2e-2)


def with_a_chunk(batch: ForwardBatch, cache: PagedKVCache, num_rows: int) -> ForwardBatch:
    """Return the batch and one segment more, of so many rows, on pages that nobody else has."""
    taken = set(batch.page_tables.flatten().tolist())
    size = cache.page_size
    pages = [page for page in range(cache.num_pages - 1) if page not in taken]
    pages = pages[: -(-num_rows // size)]
    slots = [pages[at // size] * size + at % size for at in range(num_rows)]
    more = batch.slots.new_tensor(slots)
    width = max(batch.page_tables.shape[1], len(pages))
    tables = batch.page_tables.new_zeros(batch.num_reqs + 1, width)
    tables[:-1, : batch.page_tables.shape[1]] = batch.page_tables
    tables[-1, : len(pages)] = tables.new_tensor(pages)
    end = batch.qo_indptr[-1:]
    qo_lens, kv_lens = batch.lens()
    return replace(
        batch,
        token_ids=torch.cat([batch.token_ids, more]),
        positions=torch.cat([batch.positions, more]),
        slots=torch.cat([batch.slots, more]),
        qo_indptr=torch.cat([batch.qo_indptr, end + num_rows]),
        kv_lens=torch.cat([batch.kv_lens, end.new_tensor([num_rows])]),
        page_tables=tables,
        max_rows=max(batch.max_rows, num_rows),
        host_lens=([*qo_lens, num_rows], [*kv_lens, num_rows]),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [(128, torch.float32, "float32"), (32, BFLOAT16, "head widths"), (16, BFLOAT16, "for 16")],
)
def test_a_cache_that_flash3_cannot_take_is_refused_with_the_reason(
    head_dim: int, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(BackendUnavailableError, match=reason):
        create_attention("flash3", new_cache(head_dim, dtype=dtype), 4)


def test_flash3_without_its_library_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanospec.attention import flash3_backend

    monkeypatch.setattr(flash3_backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="comes with vLLM"):
        flash3_backend.load_library()


def test_flash3_on_a_cpu_is_refused_not_replaced() -> None:
    with pytest.raises(BackendUnavailableError, match="flash3 needs a CUDA device"):
        create_attention("flash3", helpers.new_cache(), 4)
