"""A batch whose fields do not fit each other cannot be built."""

import dataclasses
from typing import Any

import pytest
import torch

from tests import helpers


@pytest.mark.parametrize(
    "change",
    [
        {"qo_lens": [1]},
        {"kv_lens": [0] * 5},
        {"page_tables": []},
        {"slots": torch.zeros(1, dtype=torch.int64)},
        {"visibility": None},
        {"num_masked": 1},
    ],
)
def test_misfits_are_refused(change: dict[str, Any]) -> None:
    batch = helpers.random_batch(1, helpers.new_cache(), num_plain=3, num_masked=2)
    with pytest.raises(AssertionError, match="malformed"):
        dataclasses.replace(batch, **change)
