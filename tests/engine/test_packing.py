"""Packed rows have the right positions, slots and logit rows."""

import torch

from nanospec.engine.packing import pack
from nanospec.types import Segment
from tests import helpers


# Other engines: llama.cpp 26478 (positions drift apart from the counters).
def test_rows_continue_where_the_cache_ends() -> None:
    first = helpers.make_request([10, 11, 12, 13, 14])
    first.kv_len, first.pages = 3, [5, 2]
    second = helpers.make_request([20, 21, 22])
    second.pages = [7]
    batch = pack([Segment(first, 2), Segment(second, 2)], 4, torch.device("cpu"))
    assert batch.token_ids.tolist() == [13, 14, 20, 21]
    assert batch.positions.tolist() == [3, 4, 0, 1]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4 + 0, 28, 29]
    assert (batch.qo_lens, batch.kv_lens) == ([2, 2], [5, 2])
    assert batch.logit_rows.tolist() == [1]  # the second is in the middle of its prompt
