"""Small things on their way between host and device, without either waiting for the other."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def prefer_faster_products() -> None:
    """Have torch multiply matrices on a GPU by cublasLt, in this process, from now on.

    Its products of 32 to 256 rows take up to 6 % less than cuBLAS's, others are level; see
    `docs/results/speed.md`. Graphs keep what they were captured with.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")


def to_device(
    values: Sequence[Any] | int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return a tensor of a number or (nested) lists of numbers, without waiting for the device.

    A copy from pageable memory waits for all work before it, one from pinned memory does not.
    """
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_cuda).to(device, non_blocking=True)


def to_device_together(
    columns: Sequence[tuple[Sequence[Any], torch.dtype]], device: torch.device
) -> list[Tensor]:
    """Return a tensor for each (nested) list of numbers and its dtype, after one copy for all.

    Each copy costs the device some 3 us between two kernels, however short it is.
    """
    values = [torch.tensor(column, dtype=dtype) for column, dtype in columns]
    if device.type != "cuda":
        return values
    starts = [0]
    for each in values:  # aligned as Triton and vectorised kernels want it
        starts.append(starts[-1] + -(-each.nbytes // 16) * 16)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    parts = [slice(start, start + each.nbytes) for start, each in zip(starts, values, strict=False)]
    for part, each in zip(parts, values, strict=True):
        packed[part].view(each.dtype).copy_(each.flatten())
    there = packed.to(device, non_blocking=True)
    return [
        there[part].view(each.dtype).view(each.shape)
        for part, each in zip(parts, values, strict=True)
    ]


class HostCopy:
    """A tensor on its way to the host; only who reads it waits, and only for what came before."""

    def __init__(self, values: Tensor):
        self._values = values.to("cpu", non_blocking=True)  # pinned, where it comes from a GPU
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait until it is there, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
