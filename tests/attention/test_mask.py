"""Visibility words say what they were made of."""

import torch

from nanospec.attention import mask


def test_words_hold_64_rows_and_give_them_back() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 2, 17, 63, 64):
        seen = torch.rand(num_rows, num_rows, generator=generator) < 0.4
        words = mask.pack_words(seen)
        assert words.shape == (num_rows,) and words.dtype == torch.int64
        want = seen | torch.eye(num_rows, dtype=torch.bool)
        assert torch.equal(mask.unpack_words(words), want)


def test_a_row_always_sees_itself() -> None:
    assert torch.equal(mask.unpack_words(torch.zeros(3, dtype=torch.int64)), torch.eye(3).bool())


def test_the_context_is_visible_to_every_row() -> None:
    full = mask.full_mask(mask.causal_mask(2, torch.device("cpu")), 5)
    assert full.tolist() == [[True, True, True, True, False], [True] * 5]
