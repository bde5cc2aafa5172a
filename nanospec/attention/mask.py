"""Visibility words, and what each backend makes of them.

The word of a row is 64 bits: bit j says whether the row sees row j of its own segment. Every row
sees the whole context, and itself.
"""

import torch
from torch import Tensor

MAX_MASKED_ROWS = 64  # rows of one segment that a word can speak of


def pack_words(visible: Tensor) -> Tensor:
    """Return the words of one segment, or of many.

    Args:
        visible: [.., n, n] bool with n <= 64; row i sees row j. The diagonal is set anyway.

    Returns:
        [.., n] int64.
    """
    num_rows = visible.shape[-1]
    assert num_rows <= MAX_MASKED_ROWS, f"{num_rows} rows do not fit a 64-bit word"
    device = visible.device
    bits = torch.ones((), dtype=torch.int64, device=device) << torch.arange(num_rows, device=device)
    seen = visible | torch.eye(num_rows, dtype=torch.bool, device=device)
    return (seen * bits).sum(dim=-1)


def unpack_words(words: Tensor) -> Tensor:
    """Return [n, n] bool of one segment's words [n] int64; the diagonal is set."""
    num_rows = len(words)
    columns = torch.arange(num_rows, device=words.device)
    seen = (words[:, None] >> columns) & 1
    return seen.bool() | torch.eye(num_rows, dtype=torch.bool, device=words.device)


def full_mask(visible: Tensor, kv_len: int) -> Tensor:
    """Widen a segment's own mask [n, n] to all its keys: [n, kv_len] bool, context visible."""
    num_rows = len(visible)
    mask = visible.new_ones(num_rows, kv_len)
    mask[:, kv_len - num_rows :] = visible
    return mask


def causal_mask(num_rows: int, device: torch.device) -> Tensor:
    """Return [n, n] bool: row i sees row j <= i."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()
