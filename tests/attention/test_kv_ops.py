"""Moves inside the cache read every slot before it is overwritten; the kernel moves alike."""

import pytest
import torch
from torch import Tensor

from nanospec.attention import kv_ops


def random_paths(seed: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return root-first ascending paths of a few requests, each on pages of its own."""
    generator = torch.Generator().manual_seed(seed)
    num_reqs, width = 5, 9
    slots = torch.randperm(num_slots, generator=generator)[: num_reqs * width].view(num_reqs, width)
    src, dst = torch.zeros_like(slots), torch.zeros_like(slots)
    counts = torch.randint(1, width + 1, (num_reqs,), generator=generator)
    for request, count in enumerate(counts.tolist()):
        path = torch.randperm(width - 1, generator=generator)[: count - 1].sort().values + 1
        src[request, 1:count] = slots[request, path]
        src[request, 0] = slots[request, 0]
        dst[request, :count] = slots[request, :count]
    return src, dst, counts


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [(2, 64, 2, 8), (1, 64, 3, 64), (3, 50, 1, 2)])
def test_move_kernel_matches_the_reference(
    seed: int, shape: tuple[int, ...], device: torch.device
) -> None:
    from nanospec.attention import kv_ops_triton

    moves = [each.to(device) for each in random_paths(seed, shape[1])]
    want = torch.randn(shape, device=device)
    got = want.clone()
    kv_ops.move_kv_reference(want, *moves)
    kv_ops_triton.move_kv(got, *moves)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_slot_is_read_before_it_is_overwritten(device: torch.device) -> None:
    cache = torch.arange(5.0, device=device).view(1, 5, 1, 1)
    path, chain = torch.tensor([[0, 2, 3, 0]]), torch.tensor([[0, 1, 2, 0]])
    kv_ops.move_kv(cache, path.to(device), chain.to(device), torch.tensor([3], device=device))
    assert cache.flatten().tolist() == [0.0, 2.0, 3.0, 3.0, 4.0]
