"""Queries, keys and values as the layer makes them, in one launch."""

import pytest
import torch
from torch import Tensor

from nanospec.models.layers import rotate
from tests import helpers

EPS = 1e-5


def by_torch(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    rope: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    dim = rope[0].shape[-1]
    q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = (
            torch.nn.functional.rms_norm(x, (dim,), weight, norms[2])
            for x, weight in ((q, norms[0]), (k, norms[1]))
        )
    return rotate(q, *rope), rotate(k, *rope), v


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64)])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_does_what_the_layer_and_the_cache_do(
    heads: int,
    kv_heads: int,
    dim: int,
    is_normed: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    from nanospec.attention import qkv_triton

    generator = torch.Generator().manual_seed(heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows, options = 5, {"num_kv_heads": kv_heads, "head_dim": dim}
    cache = helpers.new_cache(8, 4, num_layers=2, device=device, dtype=dtype, **options)
    before = cache.k.clone(), cache.v.clone()
    qkv = random(rows, (heads + 2 * kv_heads) * dim)
    norms = (random(dim), random(dim), EPS) if is_normed else None
    angles = torch.rand(rows, 1, dim, generator=generator).to(device) * 6
    rope = (angles.cos().to(dtype), angles.sin().to(dtype))
    slots = torch.tensor([3, 17, 4, 30, 9], device=device)
    q = qkv_triton.rotate_and_store(qkv, heads, norms, rope, cache.k[1], cache.v[1], slots)
    want_q, want_k, want_v = by_torch(qkv, heads, kv_heads, norms, rope)
    tolerance = 1e-5 if dtype is torch.float32 else 6e-3
    torch.testing.assert_close(q, want_q, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache.k[1, slots], want_k, rtol=tolerance, atol=tolerance)
    assert torch.equal(cache.v[1, slots], want_v)
    untouched = torch.ones(cache.k.shape[1], dtype=torch.bool, device=device)
    untouched[slots] = False
    for now, then in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(now[0], then[0]) and torch.equal(now[1, untouched], then[1, untouched])


@pytest.mark.parametrize(("kv_heads", "dim"), [(2, 8), (5, 16)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_keys_and_values_of_all_layers_are_stored_as_by_each_alone(
    kv_heads: int, dim: int, is_normed: bool, device: torch.device
) -> None:
    from nanospec.attention import qkv_triton

    generator = torch.Generator().manual_seed(kv_heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    options = {"num_kv_heads": kv_heads, "head_dim": dim, "num_layers": 3}
    cache = helpers.new_cache(8, 4, device=device, dtype=torch.float32, **options)
    before = cache.v.clone()
    kv, weights = random(3, 5, 2 * kv_heads * dim), random(3, dim)
    rope = (random(5, 1, dim), random(5, 1, dim))
    slots = torch.tensor([3, 17, 4, 30, 9], device=device)
    norms = (weights, EPS) if is_normed else None
    qkv_triton.store_layers(kv, norms, rope, cache.k, cache.v, slots)
    for layer, (own, weight) in enumerate(zip(kv, weights, strict=True)):
        own_norms = (weight, weight, EPS) if is_normed else None
        _, k, v = by_torch(own, 0, kv_heads, own_norms, rope)
        torch.testing.assert_close(cache.k[layer, slots], k, rtol=1e-5, atol=1e-5)
        assert torch.equal(cache.v[layer, slots], v)
    assert int((cache.v != before).any(dim=(2, 3)).sum()) == 3 * len(slots)
