"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

What it does before `wait` overlaps the end of the kernel before, and the launch itself costs
nothing. Nothing else changes, as long as kernels keep to these rules:

- A kernel launched so calls `wait` in every program, on every path, before it writes anything and
  before it reads anything but weights. When `wait` returns, the kernel before has ended and what it
  wrote can be seen; as that one had waited too, so has every kernel before it. A kernel launched
  the usual way waits for all that came before it, as ever. Kernels of libraries may start early as
  well (FlashInfer's do): they must not read, before they wait, what one of ours right before wrote.
  The one before FlashInfer's attention is torch's, which stores keys.
- Weights may be read before: only loading and training write them, and neither launches a kernel
  of ours right after.

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended, then let the next one start.

    It will wait likewise, so it can start at once; it gets the room that this one leaves.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def launch_options(x: Tensor) -> dict[str, bool]:
    """Return what a kernel that calls `wait(PDL)` is launched with, where `x` lies."""
    if x.is_cuda and _can_overlap(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)  # Hopper and later
