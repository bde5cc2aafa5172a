"""The noise is uniform where it should be, and depends on seed, position and token alone."""

import pytest
import torch

from nanospec.spec import noise


def keys(seed: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([seed]), torch.tensor([position])


def test_the_bits_are_splitmix64s() -> None:
    # First outputs of splitmix64 for state 1234567, from the generator's published reference.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + noise._GAMMA) % 2**64
        outputs.append(int(noise._mix(torch.tensor([noise._signed(state)]))[0]) % 2**64)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_depends_on_nothing_else() -> None:
    alone = noise.gumbel(*keys(7, 3), noise.TARGET, 50)[0]
    seeds, positions = torch.tensor([1, 7, -7]), torch.tensor([3, 3, 3])
    assert torch.equal(noise.gumbel(seeds, positions, noise.TARGET, 50)[1], alone)
    assert torch.equal(noise.gumbel(*keys(7, 3), noise.TARGET, 80)[0, :50], alone)
    for other in (keys(7, 4), keys(8, 3), keys(3, 7), keys(-7, 3), keys(2**63 - 1, 3)):
        assert not torch.equal(noise.gumbel(*other, noise.TARGET, 50)[0], alone)


def test_streams_do_not_know_of_each_other() -> None:
    draws = torch.cat(
        [noise.gumbel(torch.arange(50), torch.arange(50), stream, 400)[None] for stream in range(6)]
    ).flatten(1)
    correlation = torch.corrcoef(draws) - torch.eye(6)
    assert float(correlation.abs().max()) < 5 / draws.shape[1] ** 0.5


def test_exponentials_have_the_right_law_even_far_from_the_middle() -> None:
    draws = noise.exponential(
        torch.arange(200), torch.zeros(200).long(), noise.TARGET, 5000
    ).flatten()
    assert float(draws.mean()) == pytest.approx(1.0, abs=0.005)
    assert float(draws.var()) == pytest.approx(1.0, abs=0.02)
    assert bool((draws > 0).all()) and bool(draws.isfinite().all())
    for quantile in (1e-5, 1e-3, 0.1, 0.5, 0.9, 0.999):
        below = float((draws < -torch.log1p(torch.tensor(-quantile))).float().mean())
        deviation = (quantile * (1 - quantile) / len(draws)) ** 0.5
        assert abs(below - quantile) < 5 * deviation


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated() -> None:
    seeds, positions = torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64)
    draws = noise.gumbel(seeds, positions, noise.TARGET, 64).view(64, 64, 64)
    for axis in range(3):
        left, right = draws.narrow(axis, 0, 63).flatten(), draws.narrow(axis, 1, 63).flatten()
        correlation = torch.corrcoef(torch.stack((left, right)))[0, 1]
        assert abs(float(correlation)) < 5 / len(left) ** 0.5


@pytest.mark.gpu
def test_noise_is_the_same_on_a_gpu() -> None:
    seeds, positions = torch.arange(8), torch.arange(8)
    want = noise.gumbel(seeds, positions, noise.TARGET, 10_000)
    got = noise.gumbel(seeds.cuda(), positions.cuda(), noise.TARGET, 10_000).cpu()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
