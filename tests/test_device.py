"""What is on its way between host and device arrives as it was sent, and nobody waits for it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec.device import HostCopy, to_device_together

CPU = torch.device("cpu")
BUSY_CYCLES = 1_000_000_000  # of the GPU's clock, which is about half a second

Columns = Sequence[tuple[Sequence[Any], torch.dtype]]

# Lengths after which the next part would start anywhere, if parts were not aligned.
MIXED: list[tuple[Columns, list[tuple[int, ...]]]] = [
    ([([1, -(2**60), 3], torch.int64)], [(3,)]),
    (
        [
            ([True, False, True], torch.bool),
            ([2**60 + 1], torch.int64),
            ([[1, 2, 3], [-4, 5, -6]], torch.int32),
            ([0.1, -2.5, float("inf")], torch.float32),
            ([[[0.1], [1e-300]]], torch.float64),
            ([[True], [False]], torch.bool),
            ([7], torch.int32),
        ],
        [(3,), (1,), (2, 3), (3,), (1, 2, 1), (2, 1), (1,)],
    ),
    (
        [
            ([], torch.int64),
            ([False], torch.bool),
            ([], torch.bool),
            ([[], [], []], torch.int32),
            ([0.25], torch.float64),
            ([], torch.float32),
        ],
        [(0,), (1,), (0,), (3, 0), (1,), (0,)],
    ),
    ([([], torch.float32), ([[], []], torch.bool)], [(0,), (2, 0)]),
    ([], []),
]


def check(columns: Columns, shapes: Sequence[tuple[int, ...]], found: Sequence[Tensor]) -> None:
    assert [tuple(each.shape) for each in found] == shapes
    for (values, dtype), each in zip(columns, found, strict=True):
        assert each.dtype == dtype
        assert each.tolist() == torch.tensor(values, dtype=dtype).tolist()


@pytest.mark.parametrize(("columns", "shapes"), MIXED)
def test_columns_become_tensors_of_their_shapes_and_dtypes(
    columns: Columns, shapes: list[tuple[int, ...]], device: torch.device
) -> None:
    check(columns, shapes, to_device_together(columns, CPU))
    check(columns, shapes, to_device_together(columns, device))


def test_numbers_arrive_as_they_were() -> None:
    ints, nested, floats = to_device_together(
        [([3, 2**62], torch.int64), ([[1], [2]], torch.int32), ([0.5, 1e-3], torch.float64)], CPU
    )
    assert ints.tolist() == [3, 2**62]
    assert nested.tolist() == [[1], [2]]
    assert floats.tolist() == [0.5, 1e-3]


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "shapes"), MIXED)
def test_every_part_of_a_copy_is_aligned_and_contiguous(
    columns: Columns, shapes: list[tuple[int, ...]]
) -> None:
    found = to_device_together(columns, torch.device("cuda", 0))
    assert len(found) == len(shapes)
    for each in found:
        assert each.is_cuda and each.is_contiguous() and each.data_ptr() % 16 == 0


def columns_of(call: int) -> Columns:
    return [
        ([call % 2 == 0, call % 3 == 0, True], torch.bool),
        ([[call, -call], [call + 1, 7]], torch.int32),
        ([call * 10**12 + at for at in range(5)], torch.int64),
        ([], torch.int64),
        ([call + 0.5], torch.float32),
        ([call + 0.25, 1 / (1 + call)], torch.float64),
    ]


def busy() -> torch.cuda.Event:
    """Keep the stream busy for long; return an event that happens then."""
    torch.cuda._sleep(BUSY_CYCLES)
    done = torch.cuda.Event()
    done.record()
    return done


@pytest.mark.gpu
def test_calls_behind_a_busy_stream_neither_wait_nor_overwrite_each_other() -> None:
    """Pinned memory must not be used again before its copy is made."""
    device, num_calls = torch.device("cuda", 0), 200
    # Allocating pinned memory may wait for the device: let there be enough, in pieces as are asked
    # for below.
    held = [torch.empty(112, dtype=torch.uint8, pin_memory=True) for _ in range(num_calls)]
    del held
    to_device_together(columns_of(0), device)
    torch.cuda.synchronize()
    done = busy()
    found = [to_device_together(columns_of(call), device) for call in range(num_calls)]
    assert not done.query(), "a call has waited for the stream"
    shapes = [(3,), (2, 2), (5,), (0,), (1,), (2,)]
    for call, parts in enumerate(found):
        check(columns_of(call), shapes, parts)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_a_copy_on_the_host_is_what_it_is_of(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.tensor([[1, 0, 3], [0, 5, 6]], device=device).to(dtype)
    copy = HostCopy(values)
    for _ in range(2):  # it may be read again
        found = copy.read()
        assert found.device == CPU and found.dtype == dtype
        assert found.tolist() == values.tolist()


@pytest.mark.gpu
def test_a_copy_holds_what_the_tensor_held_though_that_is_overwritten() -> None:
    values = torch.zeros(64, 37, dtype=torch.int64, device="cuda")

    def overwritten(number: int) -> HostCopy:
        values.fill_(number)
        copy = HostCopy(values)
        values.fill_(-1)
        return copy

    held = [overwritten(number) for number in range(50)]  # allocates, and loads kernels
    assert [copy.read().unique().tolist() for copy in held] == [[each] for each in range(50)]
    del held
    torch.cuda.synchronize()
    done = busy()
    copies = [overwritten(number) for number in range(50)]
    assert not done.query(), "a copy was waited for before anybody read it"
    assert copies[0].read().is_pinned()
    for number in reversed(range(50)):
        assert copies[number].read().unique().tolist() == [number]


@pytest.mark.gpu
def test_who_reads_a_copy_waits_for_nothing_that_came_later() -> None:
    values = torch.arange(100, device="cuda")
    HostCopy(values).read()
    copy = HostCopy(values)
    done = busy()
    assert copy.read().tolist() == list(range(100))
    assert not done.query()
