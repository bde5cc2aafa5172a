"""Kernels of the sampler keep the same tokens as its specification, and draw the same."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.params import SamplingRows
from nanospec.spec import noise
from nanospec.spec.sampler import (
    draw_reference,
    probabilities,
    probabilities_reference,
    sample,
    sampling_rows,
)
from tests import helpers

CPU = torch.device("cpu")
INF = float("inf")
NAN = float("nan")
Options = dict[str, Any]
# Stretch, group, groups and block: as they are, and so small that a row has many of each, of which
# few are tried before the whole row is.
TILES = [(4096, 64, 1024, 4096), (128, 8, 3, 64)]


def rows_of(options: Sequence[Options], vocab_size: int, device: torch.device) -> SamplingRows:
    requests = [
        helpers.make_request([1], SamplingParams(**own), seed=2**62 - 5 * index * index)
        for index, own in enumerate(options)
    ]
    return sampling_rows(requests, vocab_size, device)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def set_tile(monkeypatch: pytest.MonkeyPatch, tile: tuple[int, ...]) -> None:
    from nanospec.spec import sampler_triton

    names = ("_STRETCH", "_GROUP", "_MAX_GROUPS", "_BLOCK")
    for name, size in zip(names, tile, strict=True):
        monkeypatch.setattr(sampler_triton, name, size)


def mass_above(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the mass that ranks above each token where top-p is off, [N, V] float64."""
    probs = probabilities_reference(
        logits, dataclasses.replace(rows, top_p=torch.ones_like(rows.top_p))
    ).double()
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(1, order)
    return torch.zeros_like(probs).scatter_(1, order, ranked.cumsum(-1) - ranked)


def check(logits: Tensor, options: Sequence[Options], device: torch.device) -> Tensor:
    """Compare with the specification; only where top-p decides by rounding may tokens differ."""
    from nanospec.spec import sampler_triton

    logits = logits.to(device)
    rows = rows_of(options, logits.shape[1], device)
    got = sampler_triton.probabilities(logits, rows)
    want = probabilities_reference(logits, rows)
    assert got.dtype == torch.float32
    differ = (got > 1e-30) != (want > 1e-30)
    is_close = (mass_above(logits, rows) - rows.top_p[:, None]).abs() < 1e-5
    assert bool((is_close | ~differ).all()), "other tokens are kept"
    same = ~differ.any(dim=1)
    torch.testing.assert_close(got[same], want[same], rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(got.sum(1), torch.ones_like(got[:, 0]), rtol=1e-5, atol=0)
    return got


@pytest.mark.parametrize("tile", TILES, ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_combination_of_filters_keeps_the_same(
    dtype: torch.dtype, tile: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, tile)
    options: list[Options] = [
        {"temperature": (0.7, 1.5)[(k + index) % 2], "top_k": k, "top_p": p, "min_p": m}
        for k in (0, 1, 20)
        for index, p in enumerate((1.0, 1e-4, 0.9))
        for m in (0.0, 0.03)
    ]
    options += [{"temperature": 0.0, "top_k": 3}, {"top_k": 199}, {"top_k": 500}, {"min_p": 1.0}]
    if device.type == "cpu" and (dtype, tile) != (torch.bfloat16, TILES[0]):
        options = options[4 + tile[1] % 9 :: 9]  # the interpreter takes its time
    check((2 * randn(0, len(options), 200)).to(dtype), options, device)


@pytest.mark.parametrize("tile", TILES, ids=["whole", "parts"])
def test_of_equal_logits_the_first_tokens_are_kept(
    tile: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, tile)
    options: list[Options] = [{"top_k": 1}, {"top_k": 37}, {"top_p": 0.0}, {"top_p": 0.31}]
    options += [{"top_k": 90, "top_p": 0.77}, {"top_k": 5, "min_p": 1.0}, {"temperature": 0.0}]
    few = randn(1, len(options), 200).round().clamp(-1, 1).bfloat16()  # ties at 1, 0, -0 and -1
    if device.type == "cuda" or tile == TILES[1]:  # the interpreter takes its time
        check(few, options, device)
    got = check(torch.zeros_like(few), options, device)
    assert [int((row > 0).sum()) for row in got] == [1, 37, 1, 62, 70, 5, 1]
    assert all(bool((row.diff() <= 0).all()) for row in got)  # those kept come first


def test_temperatures_may_be_tiny_or_huge(device: torch.device) -> None:
    options = [
        {"temperature": temperature, **own}
        for temperature in (1e-7, 1e-5, 1e6, 3e38)
        for own in ({}, {"top_k": 7, "top_p": 0.913}, {"min_p": 0.5})
    ]
    logits = 100 * randn(2, len(options), 200)
    logits[:, 5] = -INF
    check(logits.bfloat16(), options, device)


@pytest.mark.parametrize("tile", TILES, ids=["whole", "parts"])
def test_rows_of_few_choices_or_none(
    tile: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tile(monkeypatch, tile)
    options: list[Options] = [{}, {"top_k": 4}, {"top_p": 0.55}, {"temperature": 0.0}]
    dead = torch.full((4, 130), -INF)
    check(dead.bfloat16(), options, device)
    dead[:, 71], dead[:, 129] = 0.0, -3.0
    got = check(dead.half(), options, device)
    assert [row.nonzero().flatten().tolist() for row in got] == [[71, 129], [71, 129], [71], [71]]


@pytest.mark.parametrize("vocab_size", [1, 37, 129])
def test_any_vocabulary(vocab_size: int, device: torch.device) -> None:
    options: list[Options] = [{"top_k": 2, "top_p": 0.6}, {}, {"temperature": 0.0}]
    logits = randn(3, 3, 2, vocab_size).half()
    check(logits[:, 1], options, device)  # rows that are apart
    check(logits[:1, 0], options[:1], device)
    assert probabilities(logits[:0, 0], rows_of([], vocab_size, CPU)).shape == (0, vocab_size)


# numpy, by which kernels are interpreted, warns of what is meant here.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_and_infinity_are_those_of_the_specification(device: torch.device) -> None:
    from nanospec.spec import sampler_triton

    logits = randn(4, 5, 100)
    logits[0, 70] = NAN
    logits[1, [30, 90]] = INF
    logits[2, 40], logits[2, 20] = NAN, INF
    logits[3] = -INF
    logits[3, 60] = NAN
    logits[4] = NAN
    for own in ({}, {"top_k": 3, "top_p": 0.5}, {"temperature": 0.0}):
        rows = rows_of([own] * 5, 100, device)
        got = sampler_triton.probabilities(logits.to(device), rows)
        want = probabilities_reference(logits.to(device), rows)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def draws(probs: Tensor, rows: SamplingRows, stream: int) -> tuple[list[int], list[int]]:
    """Return the draws of kernels and specification; they may differ where rounding decides."""
    from nanospec.spec import sampler_triton

    got, want = sampler_triton.draw(probs, rows, stream), draw_reference(probs, rows, stream)
    score = probs.log() + noise.gumbel(rows.seed, rows.position, stream, probs.shape[1])
    best, own = (score.gather(1, each[:, None])[:, 0] for each in (want, got))
    is_close = (own == best) | (best - own < 2e-6 * (1 + best.abs()))
    return torch.where(is_close, want, got).tolist(), want.tolist()


@pytest.mark.parametrize(("block", "programs"), [(1024, 4096), (128, 1), (128, 40)])
@pytest.mark.parametrize("vocab_size", [1, 500])
def test_draws_are_those_of_the_specification(
    vocab_size: int,
    block: int,
    programs: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nanospec.spec import sampler_triton

    monkeypatch.setattr(sampler_triton, "_DRAW_BLOCK", block)
    monkeypatch.setattr(sampler_triton, "_DRAW_PROGRAMS", programs)
    rows = rows_of([{}] * 16, vocab_size, device)
    rows = dataclasses.replace(rows, position=torch.arange(16, device=device) ** 5)
    rows.seed[:3] = torch.tensor([-(2**63), 2**63 - 1, -1])
    sharpness = torch.linspace(0, 5, 16)[:, None]
    probs = (randn(5, 16, vocab_size) * sharpness).softmax(-1)
    probs[::2] *= randn(6, 8, vocab_size) > 0.5
    probs[1::4] *= 1e-35  # they need not sum to 1
    for stream in (noise.TARGET, noise.DRAFT + 6):
        got, want = draws(probs.to(device), rows, stream)
        assert got == want
    assert len(set(want)) > 8 or vocab_size == 1


def test_where_nothing_is_probable_it_is_the_first_token(device: torch.device) -> None:
    from nanospec.spec import sampler_triton

    probs = torch.zeros(3, 300, device=device)
    probs[1, 299] = 1e-38
    assert sampler_triton.draw(probs, rows_of([{}] * 3, 300, device), 0).tolist() == [0, 299, 0]


CASES: list[Options] = [
    {},
    {"temperature": 0.0},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.6},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 50_000},
    {"temperature": 3.0, "top_p": 0.99},
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
@pytest.mark.parametrize("count", [1, 3])
def test_a_real_vocabulary(count: int, sharpness: float, dtype: torch.dtype) -> None:
    cuda, options = torch.device("cuda"), CASES * count
    logits = (sharpness * randn(7, len(options), 151936)).to(dtype)
    probs = check(logits, options, cuda)
    got, want = draws(probs, rows_of(options, 151936, cuda), noise.TARGET)
    assert got == want


@pytest.mark.gpu
def test_sampling_on_a_gpu_is_that_on_a_cpu_stops_and_all() -> None:
    options = [{**own, "min_tokens": n, "max_tokens": 9} for own in CASES for n in (0, 3)]
    requests = [
        helpers.make_request([1], SamplingParams(**own), seed=i, stop_token_ids=frozenset({3, 8}))
        for i, own in enumerate(options)
    ]
    logits = randn(8, len(options), 1000)
    logits[:, 8] = 9.0
    logits[::5] = -INF
    cuda = torch.device("cuda")
    want = sample(logits, sampling_rows(requests, 1000, CPU))
    got = sample(logits.cuda(), sampling_rows(requests, 1000, cuda))
    assert got.tolist() == want.tolist()
    empty = sample(logits[:0].cuda(), sampling_rows([], 1000, cuda))
    assert empty.tolist() == []


@pytest.mark.gpu
def test_draws_on_a_gpu_follow_the_probabilities() -> None:
    count, cuda = 40_000, torch.device("cuda")
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0], device=cuda)
    for own in ({}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.3}):
        rows = rows_of([own], 6, cuda)
        rows = rows.at(
            torch.zeros(count, dtype=torch.int64, device=cuda), torch.arange(count).cuda()
        )
        counts = sample(logits.repeat(count, 1), rows).bincount(minlength=6).double()
        expected = (
            probabilities_reference(logits[None], rows_of([own], 6, cuda))[0].double() * count
        )
        live = expected > 0
        assert float(counts[~live].sum()) == 0
        # 0.9999 quantile of chi-square with 5 degrees of freedom; seeds are fixed.
        assert float(((counts - expected)[live] ** 2 / expected[live]).sum()) < 25.7


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_samples_what_it_finds() -> None:
    cuda, count = torch.device("cuda"), len(CASES)
    logits = randn(9, count, 5000).cuda()
    rows = rows_of(CASES, 5000, cuda)
    sample(logits, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sample(logits, rows)
    for seed in range(5):
        logits.copy_(randn(seed, count, 5000))
        rows.position.add_(1)
        for column in (rows.temperature, rows.top_k, rows.top_p, rows.min_p):
            column.copy_(column.roll(1))
        graph.replay()
        found = got.tolist()
        assert found == sample(logits, rows).tolist()
