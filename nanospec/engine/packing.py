"""From segments to the packed rows of a `ForwardBatch`."""

from collections.abc import Sequence

import torch

from nanospec.attention.batch import ForwardBatch
from nanospec.types import Segment


def pack(segments: Sequence[Segment], page_size: int, device: torch.device) -> ForwardBatch:
    """Lay out the next rows of each segment's request, causal, in the order given.

    The logits of a segment's last row are wanted where it samples, in the order of the segments.

    Args:
        segments: each request holds pages for its rows.
        page_size: tokens per page.
        device: where the tensors go.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for segment in segments:
        request, start = segment.request, segment.request.kv_len
        end = start + segment.num_rows
        token_ids += request.tokens[start:end]
        positions += range(start, end)
        slots += [
            request.pages[position // page_size] * page_size + position % page_size
            for position in range(start, end)
        ]
        if segment.samples:
            logit_rows.append(len(token_ids) - 1)
    rows = torch.tensor([token_ids, positions, slots], dtype=torch.int64).to(device)
    return ForwardBatch(
        token_ids=rows[0],
        positions=rows[1],
        slots=rows[2],
        qo_lens=[segment.num_rows for segment in segments],
        kv_lens=[segment.request.kv_len + segment.num_rows for segment in segments],
        page_tables=[segment.request.pages for segment in segments],
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64).to(device),
    )
