"""Products of a few rows are torch's, whatever the launch shape, and compile once."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanospec.models import layers
from nanospec.models.layers import Linear, swiglu

INPUTS, OUTPUTS = 256, 64
QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]  # outputs, inputs
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Triton's interpreter multiplies the bit patterns of bfloat16 in tl.dot (seen in 3.9), which one
# row goes without.
BF16 = [pytest.param(torch.bfloat16, rows, marks=pytest.mark.gpu) for rows in range(2, 17)]
CASES = [(torch.float16, rows) for rows in range(1, 17)] + [(torch.bfloat16, 1), *BF16]
SHAPES = [
    # tensor cores, rows that are computed, tile, warps, stages
    (False, 1, 8, 256, 4, 2),
    (False, 1, 2, 128, 2, 1),
    (False, 2, 4, 128, 4, 2),
    (False, 4, 16, 128, 4, 4),
    (True, 8, 64, 128, 4, 3),
    (True, 8, 16, 256, 2, 3),
    (True, 16, 32, 128, 4, 6),
    (True, 16, 16, 128, 2, 4),
]
FIELDS = ("uses_dot", "padded_rows", "block_outputs", "block_inputs", "num_warps", "num_stages")


def operands(
    rows: int,
    device: torch.device,
    dtype: torch.dtype = torch.float16,
    outputs: int = OUTPUTS,
    inputs: int = INPUTS,
) -> tuple[Tensor, Tensor]:
    """Return rows and weights whose products are about 1."""
    generator = torch.Generator(device).manual_seed(rows)
    x, weight = (
        torch.randn(size, inputs, generator=generator, device=device) for size in (rows, outputs)
    )
    weight = (weight / inputs**0.5).to(dtype)
    if device.type == "cuda":
        torch.cuda.synchronize()  # weights may be read ahead of kernels that still run
    return x.to(dtype), weight


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float()).to(x.dtype)


@pytest.mark.parametrize(("dtype", "rows"), CASES)
def test_products_of_few_rows_are_exact_but_for_one_rounding(
    dtype: torch.dtype, rows: int, device: torch.device
) -> None:
    from nanospec.models import linear_triton

    x, weight = operands(rows, device, dtype)
    assert linear_triton.can_run(x, weight)
    got, want = linear_triton.linear(x, weight), exact(x, weight)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    # Where the steps one by one round, this rounds.
    fused, want = linear_triton.linear_swiglu(x, weight), swiglu(got)
    torch.testing.assert_close(fused, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("fields", SHAPES, ids=str)
@pytest.mark.parametrize("missing", [0, 1])
def test_any_launch_shape_gives_the_same(
    fields: tuple[int, ...], missing: int, device: torch.device
) -> None:
    from nanospec.models import linear_triton

    shape = linear_triton.LaunchShape(
        **dict(zip(FIELDS, fields, strict=True)),  # type: ignore[arg-type]
    )
    rows = max(shape.padded_rows - missing, 1)
    x, weight = operands(rows, device)
    want = exact(x, weight)
    got = linear_triton.linear(x, weight, shape)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    got = linear_triton.linear_swiglu(x, weight, shape)
    torch.testing.assert_close(got, swiglu(want), rtol=4e-3, atol=4e-3)


def test_leading_dimensions_stay(device: torch.device) -> None:
    from nanospec.models import linear_triton

    x, weight = operands(6, device)
    x = x.view(2, 3, INPUTS)
    assert linear_triton.can_run(x, weight)
    got, want = linear_triton.linear(x, weight), exact(x, weight)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    assert linear_triton.linear_swiglu(x, weight).shape == (2, 3, OUTPUTS // 2)


def refused() -> Iterator[tuple[str, Tensor, Tensor]]:
    from nanospec.models import linear_triton

    def half(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float16)

    yield "no rows", half(0, 256), half(64, 256)
    yield "too many rows", half(17, 256), half(64, 256)
    yield "too many rows in all", half(3, 6, 256), half(64, 256)
    yield "ragged inputs", half(1, 192), half(64, 192)
    yield "ragged outputs", half(1, 256), half(72, 256)
    yield "a vocabulary", half(1, 128), half(linear_triton.MAX_OUTPUTS + 16, 128)
    yield "32 bits", half(1, 256).float(), half(64, 256).float()
    yield "other weights than rows", half(1, 256), half(64, 256).bfloat16()
    yield "scattered rows", half(256, 2).T, half(64, 256)
    yield "scattered weights", half(1, 256), half(256, 64).T
    yield "rows that start anywhere", half(257)[1:].view(1, 256), half(64, 256)


def test_what_it_cannot_do_is_refused() -> None:
    from nanospec.models import linear_triton

    assert linear_triton.can_run(torch.zeros(16, 256).half(), torch.zeros(64, 256).half())
    taken = [what for what, x, weight in refused() if linear_triton.can_run(x, weight)]
    assert taken == []


@pytest.mark.parametrize("outputs", [16, 48, 576, 1024, 2048, 4096, 6144, 9728, 24576, 65536])
@pytest.mark.parametrize("inputs", [128, 640, 1024, 2560, 4096, 12288, 20480])
def test_tiles_cover_the_weights_and_few_kernels_do_for_all_rows(outputs: int, inputs: int) -> None:
    from nanospec.models import linear_triton

    sizes = {"outputs": outputs, "inputs": inputs, "num_sms": 132}
    shapes = [linear_triton.launch_shape(num_rows=rows, **sizes) for rows in range(1, 17)]
    assert len(set(shapes)) <= 3
    for rows, shape in enumerate(shapes, 1):
        assert rows <= shape.padded_rows
        assert outputs % shape.block_outputs == 0 and inputs % shape.block_inputs == 0
        assert shape.block_outputs >= 2


def test_layers_use_it_where_it_can_run(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanospec.models import linear_triton

    monkeypatch.setattr(layers, "_has_kernels", lambda x: not torch.is_grad_enabled())
    ran = []
    for name in ("linear", "linear_swiglu"):
        kernel = getattr(linear_triton, name)
        monkeypatch.setattr(
            linear_triton, name, lambda x, w, k=kernel, n=name: ran.append(n) or k(x, w)
        )
    x, weight = operands(5, device)
    module = Linear(INPUTS, OUTPUTS, torch.float16, device)
    module.weight.copy_(weight)
    reference = exact(x, weight)
    torch.testing.assert_close(module(x), reference, rtol=2e-3, atol=2e-3)
    assert ran == []  # with gradients
    with torch.no_grad():
        torch.testing.assert_close(module(x), reference, rtol=2e-3, atol=2e-3)
        got = layers.linear_swiglu(x, module.weight)
        many = module(x.repeat(4, 1))
    torch.testing.assert_close(got, swiglu(reference), rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(many, reference.repeat(4, 1), rtol=2e-3, atol=2e-3)
    assert ran == ["linear", "linear_swiglu"]


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), QWEN3_8B)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16])
def test_products_of_a_real_layer_are_exact_but_for_one_rounding(
    outputs: int, inputs: int, rows: int
) -> None:
    from nanospec.models import layers_triton, linear_triton

    x, weight = operands(rows, torch.device("cuda", 0), torch.bfloat16, outputs, inputs)
    assert linear_triton.can_run(x, weight)
    got, want = linear_triton.linear(x, weight), exact(x, weight)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    fused, want = linear_triton.linear_swiglu(x, weight), layers_triton.swiglu(got)
    torch.testing.assert_close(fused, want, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_other_numbers_of_rows_compile_nothing() -> None:
    from nanospec.models import linear_triton

    def compiled() -> int:
        kernels = (linear_triton._fma_kernel, linear_triton._dot_kernel)
        return sum(len(caches[0]) for each in kernels for caches in each.device_caches.values())

    def run(rows: int) -> int:
        x, weight = operands(rows, torch.device("cuda", 0))
        linear_triton.linear(x, weight)
        return compiled()

    before = [run(rows) for rows in (1, 2, 9)][-1]
    assert [run(rows) for rows in range(1, 17)] == [before] * 16
