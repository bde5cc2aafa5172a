"""The specification of attention against the formula, one row and head at a time."""

import pytest
import torch
from torch import Tensor

from nanospec.attention import torch_backend
from nanospec.attention.backend import create_attention
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.attention.mask import unpack_words
from nanospec.attention.torch_backend import TorchAttention
from nanospec.errors import BackendUnavailableError
from tests import helpers


def attend_by_formula(cache: PagedKVCache, batch: ForwardBatch, q: Tensor) -> Tensor:
    """Softmax over the keys each row may see, in float64."""
    size, num_heads = cache.page_size, q.shape[1]
    group = num_heads // cache.num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    row = start = 0
    for index, (qo_len, kv_len) in enumerate(zip(*batch.lens(), strict=True)):
        table = batch.page_tables[index].tolist()
        slots = [table[p // size] * size + p % size for p in range(kv_len)]
        context = kv_len - qo_len
        for own in range(qo_len):
            seen = list(range(context))
            if index >= batch.num_unmasked:
                assert batch.words is not None
                visible = unpack_words(batch.words[start : start + qo_len])[own]
                seen += [context + j for j in range(qo_len) if visible[j]]
            elif batch.is_full:
                seen = list(range(kv_len))
            else:
                seen = list(range(context + own + 1))
            for head in range(num_heads):
                keys = cache.k[0, [slots[j] for j in seen], head // group].double()
                values = cache.v[0, [slots[j] for j in seen], head // group].double()
                scores = keys @ q[row, head].double() / q.shape[2] ** 0.5
                out[row, head] = scores.softmax(0) @ values
            row += 1
        start += qo_len
    return out


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", ["causal", "full", "masked", "mixed"])
def test_every_row_attends_to_what_its_mask_shows(seed: int, page_size: int, kind: str) -> None:
    cache = helpers.new_cache(num_pages=400 // page_size, page_size=page_size)
    counts = {"causal": (4, 0), "full": (4, 0), "masked": (0, 4), "mixed": (3, 3)}[kind]
    batch = helpers.random_batch(
        seed, cache, num_plain=counts[0], num_masked=counts[1], is_full=kind == "full"
    )
    torch.manual_seed(seed)
    q, k, v = (torch.randn(batch.num_tokens, heads, 8) for heads in (6, 2, 2))
    attention = TorchAttention(cache)
    attention.begin(batch)
    out = attention.attend(0, q, k, v)
    torch.testing.assert_close(cache.k[0, batch.slots], k, rtol=0, atol=0)
    want = attend_by_formula(cache, batch, q)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_long_chunk_is_attended_in_parts(monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    cache = helpers.new_cache(num_pages=200, page_size=3)
    batch = helpers.random_batch(1, cache, num_plain=4, num_masked=0, is_full=is_full)
    torch.manual_seed(1)
    q, k, v = (torch.randn(batch.num_tokens, heads, 8) for heads in (6, 2, 2))
    monkeypatch.setattr(torch_backend, "_MOST_ROWS", 2)
    assert max(batch.lens()[0]) > 2 * 2
    attention = TorchAttention(cache)
    attention.begin(batch)
    out = attention.attend(0, q, k, v)
    want = attend_by_formula(cache, batch, q)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_flashinfer_on_a_cpu_is_refused_not_replaced() -> None:
    with pytest.raises(BackendUnavailableError, match="--attention torch"):
        create_attention("flashinfer", helpers.new_cache(), 4)
