"""Small things on their way between host and device, without either waiting for the other."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Column = tuple[Sequence[Any] | Array, torch.dtype]  # numbers, perhaps nested, and what they become

_NUMPY = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bool: np.bool_,
}


def prefer_faster_products() -> None:
    """Have torch multiply matrices on a GPU by cublasLt, in this process, from now on.

    Its products of 32 to 256 rows take up to 6 % less than cuBLAS's, others are level; see
    `docs/results/speed.md`. Graphs keep what they were captured with.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")


def to_device(
    values: Sequence[Any] | Array | int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return a tensor of a number or (nested) lists of numbers, without waiting for the device.

    A copy from pageable memory waits for all work before it, one from pinned memory does not.
    """
    here = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        here = here.pin_memory()  # not while it is made: numpy's numbers cannot be
    return here.to(device, non_blocking=True)


def to_device_together(columns: Sequence[Column], device: torch.device) -> list[Tensor]:
    """Return a tensor for each (nested) list of numbers and its dtype, after one copy for all.

    Each copy costs the device some 3 us between two kernels, however short it is. Numpy reads lists
    in a quarter to half of the time that torch takes for it, and arrays at once.
    """
    arrays: list[Array] = [np.array(column, dtype=_NUMPY[dtype]) for column, dtype in columns]
    if device.type != "cuda":
        return [torch.from_numpy(each) for each in arrays]
    # Aligned as Triton and vectorised kernels want it.
    starts = list(accumulate((-(-each.nbytes // 16) * 16 for each in arrays), initial=0))
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    host = packed.numpy()
    for start, each in zip(starts, arrays, strict=False):
        host[start : start + each.nbytes].view(each.dtype)[:] = each.ravel()
    there = packed.to(device, non_blocking=True)
    views = {dtype: there.view(dtype) for _, dtype in columns}
    return [
        views[dtype].narrow(0, start // each.itemsize, each.size).view(each.shape)
        for start, each, (_, dtype) in zip(starts, arrays, columns, strict=False)
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
