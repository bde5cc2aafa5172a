"""Small lists on their way from the host to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(
    values: Sequence[Any] | int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return a tensor of a number or (nested) lists of numbers, without waiting for the device.

    A copy from pageable memory waits for all work before it, one from pinned memory does not.
    """
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)
