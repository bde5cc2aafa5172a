"""A batch whose fields do not fit each other cannot be built."""

import dataclasses
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nanospec.attention.batch import padded_tables
from tests import helpers


@pytest.mark.parametrize(
    "change",
    [
        {"host_lens": ([1], [1])},
        {"host_lens": ([1] * 5, [0] * 5)},
        {"qo_indptr": torch.zeros(3, dtype=torch.int32)},
        {"page_tables": torch.zeros(1, 1, dtype=torch.int32)},
        {"slots": torch.zeros(1, dtype=torch.int64)},
        {"words": None},
        {"words": torch.zeros(1, dtype=torch.int64)},
        {"max_rows": 1},
    ],
)
def test_misfits_are_refused(change: dict[str, Any]) -> None:
    batch = helpers.random_batch(1, helpers.new_cache(), num_plain=3, num_masked=2)
    with pytest.raises(AssertionError, match="malformed"):
        dataclasses.replace(batch, **change)


def test_lengths_the_host_does_not_know_are_read() -> None:
    batch = helpers.random_batch(1, helpers.new_cache(), num_plain=3, num_masked=2)
    assert dataclasses.replace(batch, host_lens=None).lens() == batch.host_lens


@pytest.mark.parametrize(
    ("tables", "want"),
    [
        ([[3, 2**31 - 1], [], array("i", [7]), [0, 5]], [[3, 2**31 - 1], [0, 0], [7, 0], [0, 5]]),
        ([[], []], [[0], [0]]),
        ([], []),
    ],
)
def test_page_tables_are_padded_to_the_longest(
    tables: list[Sequence[int]], want: list[list[int]]
) -> None:
    padded = padded_tables(tables)
    assert padded.dtype == np.int32 and padded.shape[1] >= 1
    assert padded.tolist() == want
