"""The cache is addressed by slot; pages are views of the same memory."""

import torch

from tests import helpers


def test_store_writes_the_slots_of_one_layer_and_nothing_else() -> None:
    cache = helpers.new_cache(num_pages=4, page_size=3, num_layers=2)
    before_k, before_v = cache.k.clone(), cache.v.clone()
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    slots = torch.tensor([7, 2])
    cache.store(1, k, v, slots)
    before_k[1, slots], before_v[1, slots] = k, v
    assert torch.equal(cache.k, before_k) and torch.equal(cache.v, before_v)
    assert torch.equal(cache.pages(1)[0][2, 1], k[0])
    assert torch.equal(cache.pages(1)[1][0, 2], v[1])
    assert cache.num_pages == 4
