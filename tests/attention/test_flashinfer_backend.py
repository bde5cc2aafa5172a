"""FlashInfer equals the torch backend, for every mask, page size, group and head width."""

import pytest
import torch

from nanospec.attention.backend import create_attention
from nanospec.attention.batch import build_batch
from nanospec.attention.torch_backend import TorchAttention
from nanospec.errors import BackendUnavailableError
from tests import helpers

pytestmark = pytest.mark.gpu

KINDS = {"causal": (5, 0), "full": (5, 0), "masked": (0, 5), "mixed": (4, 4)}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 3), (8, 2)])
@pytest.mark.parametrize(  # each pair is a kernel of its own, compiled at first use
    ("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float16)]
)
def test_flashinfer_matches_the_torch_backend(
    kind: str, page_size: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    device = torch.device("cuda", 0)
    options = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "device": device, "dtype": dtype}
    cache = helpers.new_cache(num_pages=800 // page_size, page_size=page_size, **options)
    fast = create_attention("flashinfer", cache, num_heads)
    slow = TorchAttention(cache)
    for seed in range(4):  # one backend over several plans, as in a running engine
        num_plain, num_masked = KINDS[kind]
        batch = helpers.random_batch(
            seed, cache, num_plain=num_plain, num_masked=num_masked, is_full=kind == "full"
        )
        q, k, v = (
            torch.randn(batch.num_tokens, heads, head_dim, device=device, dtype=dtype)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        fast.begin(batch)
        got = fast.attend(0, q, k, v)
        slow.begin(batch)
        torch.testing.assert_close(got, slow.attend(0, q, k, v), rtol=2e-2, atol=2e-2)


def test_a_cache_that_flashinfer_cannot_take_is_refused_with_the_reason() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(BackendUnavailableError, match="float32"):
        create_attention("flashinfer", helpers.new_cache(device=device, head_dim=64), 4)
    with pytest.raises(BackendUnavailableError, match="head widths"):
        cache = helpers.new_cache(device=device, dtype=torch.bfloat16)
        create_attention("flashinfer", cache, 4)


# Other engines: flashinfer 725 (sequences shorter than a page differed from each other).
def test_two_identical_sequences_of_one_token_give_identical_rows() -> None:
    device = torch.device("cuda", 0)
    options = {"head_dim": 64, "device": device, "dtype": torch.bfloat16}
    cache = helpers.new_cache(num_pages=8, page_size=16, **options)
    attention = create_attention("flashinfer", cache, 4)
    slots = torch.tensor([3 * 16, 6 * 16], device=device)
    batch = build_batch(slots, slots, slots, [1, 1], [1, 1], [[3], [6]], slots[:0])
    q, k, v = (
        torch.randn(1, heads, 64, device=device, dtype=torch.bfloat16).repeat(2, 1, 1)
        for heads in (4, 2, 2)
    )
    attention.begin(batch)
    out = attention.attend(0, q, k, v)
    assert torch.equal(out[0], out[1])
    torch.testing.assert_close(out[0], v[0].repeat_interleave(2, dim=0), rtol=1e-2, atol=1e-2)
