"""Probabilities after filters, and draws that follow them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.params import SamplingRows
from nanospec.spec.sampler import probabilities, sample, sampling_rows
from tests import helpers

CPU = torch.device("cpu")


def rows_of(*options: dict[str, Any], vocab_size: int = 8, **request: Any) -> SamplingRows:
    """Return rows with these sampling parameters, each its own seed."""
    requests = [
        helpers.make_request([1], SamplingParams(**own), seed=index, **request)
        for index, own in enumerate(options)
    ]
    return sampling_rows(requests, vocab_size, CPU)


def positions_of(request: Any, count: int, vocab_size: int) -> SamplingRows:
    """Return rows of one request at its next `count` output positions."""
    first = torch.zeros(count, dtype=torch.int64)
    return sampling_rows([request], vocab_size, CPU).at(first, torch.arange(count))


def by_definition(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, min-p, top-k, top-p, one token at a time in float64."""
    probs = (logits.double() / params.temperature).softmax(0)
    probs[probs < params.min_p * probs.max()] = 0
    order = sorted(range(len(probs)), key=lambda token: (-float(probs[token]), token))
    for rank, token in enumerate(order):
        if 0 < params.top_k <= rank:
            probs[token] = 0
    probs /= probs.sum()
    mass = 0.0
    for rank, token in enumerate(order):
        if rank > 0 and mass >= params.top_p:
            probs[token] = 0
        else:
            mass += float(probs[token])
    return probs / probs.sum()


@pytest.mark.parametrize("seed", range(5))
def test_filters_follow_their_definition_and_each_row_its_own(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    options: list[dict[str, Any]] = [
        {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
        for t in (0.3, 1.0, 2.0)
        for k in (0, 1, 3, 100)
        for p in (0.0, 0.4, 0.9, 1.0)
        for m in (0.0, 0.2)
    ]
    logits = torch.randn(len(options), 8, generator=generator) * 2
    got = probabilities(logits, rows_of(*options))
    for row, own in enumerate(options):
        want = by_definition(logits[row], SamplingParams(**own)).float()
        torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-6)


def test_equal_probabilities_are_ranked_by_token() -> None:
    logits = torch.zeros(2, 8)
    got = probabilities(logits, rows_of({"top_k": 3}, {"top_p": 0.25}))
    assert got[0].nonzero().flatten().tolist() == [0, 1, 2]
    assert got[1].nonzero().flatten().tolist() == [0, 1]


def test_the_larger_logit_ranks_first_even_if_its_probability_is_rounded_to_the_same() -> None:
    logits = torch.tensor([[0.0, 1e-3, 0.0]])
    for own in ({"top_k": 1}, {"top_p": 0.3}):
        got = probabilities(logits, rows_of({"temperature": 1e6, **own}, vocab_size=3))
        assert got.tolist() == [[0.0, 1.0, 0.0]]


def test_greedy_takes_the_first_of_equals_alone_and_beside_sampled_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits, rows_of({"temperature": 0}, vocab_size=4)).tolist() == [1]
    mixed = rows_of({"temperature": 0}, {"temperature": 1.0}, vocab_size=4)
    assert sample(logits.repeat(2, 1), mixed)[0] == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiny_temperatures_do_not_overflow(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-3e4, 3e4, 2e4, -torch.inf]], dtype=dtype)
    rows = rows_of({"temperature": temperature}, vocab_size=4)
    assert probabilities(logits, rows).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert sample(logits, rows).tolist() == [1]


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = probs.double() * counts.sum()
    live = expected > 0
    assert int(counts[~live].sum()) == 0, "a token outside the support was drawn"
    return float(((counts - expected)[live] ** 2 / expected[live]).sum())


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.3}]
)
def test_draws_follow_the_probabilities(options: dict[str, Any]) -> None:
    count = 40_000
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])
    request = helpers.make_request([1], SamplingParams(**options), seed=11)
    rows = positions_of(request, count, 6)
    tokens = sample(logits.expand(count, 6), rows)
    probs = probabilities(logits[None], rows_of(options, vocab_size=6))[0]
    statistic = chi_square(tokens.bincount(minlength=6), probs)
    # 0.9999 quantile of chi-square with 5 degrees of freedom; seeds are fixed.
    assert statistic < 25.7
    uniform = torch.full((6,), 1 / 6)
    generator = torch.Generator().manual_seed(0)
    fair = torch.multinomial(uniform, count, True, generator=generator).bincount(minlength=6)
    assert (
        chi_square(fair, uniform)
        < 25.7
        < chi_square(tokens.bincount(minlength=6) + 200, (probs + 0.01) / 1.06)
    )


# Other engines: sparkring 161, vllm PR 42802 (filters that never reached the sampler).
@pytest.mark.parametrize(
    ("options", "support"),
    [({"top_p": 0.1}, {2}), ({"min_p": 0.3}, {2, 4}), ({"top_k": 2}, {2, 4})],
)
def test_nothing_outside_the_support_is_ever_drawn(
    options: dict[str, Any], support: set[int]
) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0])
    request = helpers.make_request([1], SamplingParams(**options), seed=5)
    rows = positions_of(request, 10_000, 6)
    assert set(sample(logits.expand(10_000, 6), rows).tolist()) == support


# Other engines: vllm PR 41768 (the min_tokens mask was off by rows).
def test_min_tokens_forbids_stops_in_exactly_the_rows_below_it() -> None:
    params = [SamplingParams(temperature=0, min_tokens=n, max_tokens=99) for n in (0, 3, 0, 3)]
    requests = [helpers.make_request([1], own, stop_token_ids=frozenset({2, 5})) for own in params]
    index, ahead = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 0, 3])
    rows = sampling_rows(requests, 8, CPU).at(index, ahead)
    logits = torch.zeros(4, 8)
    logits[:, 5], logits[:, 2], logits[:, 7] = 3, 2, 1
    assert sample(logits, rows).tolist() == [5, 7, 5, 5]
    assert float(logits[1, 5]) == 3  # the caller's logits are left alone


# Found in review: where only forbidden stops were possible, a stop came all the same.
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nothing_but_forbidden_stops_draws_something_else(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=3, max_tokens=9)
    request = helpers.make_request([1], params, stop_token_ids=frozenset({0, 2}))
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    assert sample(logits, sampling_rows([request], 4, CPU)).tolist()[0] in (1, 3)


def test_mixed_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    options: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 2}, {"temperature": 0.5}]
    together = probabilities(logits, rows_of(*options))
    for row, own in enumerate(options):
        alone = probabilities(logits[row : row + 1], rows_of(own))
        torch.testing.assert_close(together[row], alone[0], rtol=1e-6, atol=0)
