"""Tiers waste little, and padding never changes a real row nor touches a live page."""

import random
from pathlib import Path

import pytest
import torch

from nanospec.attention.backend import AttentionBackend
from nanospec.attention.torch_backend import TorchAttention
from nanospec.cudagraph.buckets import pad_batch, row_tiers, tier_of
from nanospec.cudagraph.runner import EagerRunner
from tests import helpers
from tests.models.test_decoder import load


def test_small_tiers_are_every_size_and_large_ones_hold_all_multiples_of_64() -> None:
    tiers = row_tiers(2048)
    assert tiers[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert tiers == sorted(set(tiers)) and set(range(64, 2049, 64)) <= set(tiers)
    assert all(tier % 8 == 0 for tier in tiers if tier > 64)
    assert row_tiers(5) == [1, 2, 3, 4, 5] and row_tiers(77)[-3:] == [64, 72, 77]
    assert row_tiers(1) == [1]


def test_rows_run_in_the_smallest_tier_that_holds_them() -> None:
    tiers = row_tiers(256)
    assert tier_of(sum([8, 3, 1, 5]), tiers) == 18
    assert [tier_of(rows, tiers) for rows in (1, 64, 65, 256)] == [1, 64, 72, 256]
    assert tier_of(257, tiers) is None


def test_ragged_batches_are_padded_by_3_percent_at_most() -> None:
    rng = random.Random(0)
    tiers = row_tiers(2048)
    padding = []
    for _ in range(5000):
        rows = sum(rng.randint(1, 8) for _ in range(rng.randint(1, 256)))
        tier = tier_of(rows, tiers)
        assert tier is not None
        padding.append(tier / rows - 1)
    assert sum(padding) / len(padding) <= 0.03


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("num_masked", [0, 2])
def test_padding_changes_no_real_row_and_no_live_page(
    qwen3: Path, backend: str, num_masked: int
) -> None:
    decoder = load(qwen3)

    def run(rows: int, reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = helpers.new_cache(num_layers=3, head_dim=16)
        batch = helpers.random_batch(2, cache, num_plain=3, num_masked=num_masked)
        generator = torch.Generator().manual_seed(1)
        batch.token_ids.copy_(torch.randint(300, (batch.num_tokens,), generator=generator))
        attention: AttentionBackend = TorchAttention(cache)
        if backend == "triton":
            from nanospec.attention.triton_backend import TritonAttention

            attention = TritonAttention(cache, 4)
        real = batch.num_tokens
        padded = pad_batch(batch, real + rows, batch.num_reqs + reqs, cache.scratch_slot)
        assert padded.num_tokens == real + rows and padded.num_reqs == batch.num_reqs + reqs
        with torch.inference_mode():
            EagerRunner(decoder, attention).run(padded)
            attention.begin(padded)
            hidden, _ = decoder(padded.token_ids, padded.positions, attention)
        live = torch.cat((cache.k[:, : cache.scratch_slot], cache.v[:, : cache.scratch_slot]))
        return hidden[:real], live

    want, pages = run(0, 0)
    for rows, reqs in ((1, 0), (5, 2), (0, 3)):
        got, live = run(rows, reqs)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(live, pages, rtol=1e-5, atol=1e-5)
