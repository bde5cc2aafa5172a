"""The law of the output is the target's, whatever is drafted: counted, through whole rounds.

Each test draws at least 20,000 outputs of three tokens after a certain first one, over two to three
rounds, and compares their joint law with the product of the target's own. Seeds are fixed, so the
outcome is too.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.cudagraph.runner import TargetOutput
from nanospec.spec import accept, speculator
from nanospec.spec.budget import CostTable
from nanospec.spec.sampler import probabilities, sampling_rows
from nanospec.spec.speculator import Speculator
from nanospec.types import AcceptResult, PackedRows, VerifyPlan
from tests import helpers, speculators
from tests.speculators import (
    SMALL,
    ConfidentChain,
    Mixed,
    P,
    PointMassTree,
    Q,
    SampledChain,
    SampledTree,
    run_tables,
)

DRAWS, BATCH = 20_000, 1000


def next_token_law(**params: Any) -> Tensor:
    """Return [V, V]: what follows each token, after the filters."""
    params.pop("adaptive", None)
    own = SamplingParams(**({"temperature": 1.0} | params))
    request = helpers.make_request([0], own)
    rows = sampling_rows([request] * SMALL, SMALL, torch.device("cpu"))
    return probabilities(P, rows).double()


def joint_law(law: Tensor) -> Tensor:
    """Return [V, V, V]: the three tokens after the certain first one, which is 0."""
    return law[0][:, None, None] * law[:, :, None] * law[None, :, :]


def draws(kind: type[Speculator], count: int = DRAWS, **params: Any) -> list[list[int]]:
    """Return the three tokens after the first of many outputs."""
    found = []
    for start in range(0, count, BATCH):
        requests, _ = run_tables(kind, range(start, start + BATCH), **params)
        found += [request.output_token_ids for request in requests]
    assert all(len(tokens) == 4 and tokens[0] == 0 for tokens in found)
    return [tokens[1:] for tokens in found]


def chi_square(found: list[list[int]], law: Tensor) -> tuple[float, float]:
    """Return the statistic of cells with 5 expected or more, and its 0.9999 quantile."""
    index = torch.tensor(found) @ torch.tensor([SMALL**2, SMALL, 1])
    counts = index.bincount(minlength=SMALL**3).double()
    expected = law.flatten() * len(found)
    assert float(counts[expected == 0].sum()) == 0, "something outside the support was drawn"
    large = expected >= 5
    counts = torch.cat((counts[large], counts[~large].sum()[None]))
    expected = torch.cat((expected[large], expected[~large].sum()[None]))
    live = expected > 0
    statistic = float(((counts - expected)[live] ** 2 / expected[live]).sum())
    return statistic, quantile(int(live.sum()) - 1)


def quantile(freedom: int) -> float:
    """Return the 0.9999 quantile of chi-square: Wilson and Hilferty's approximation."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


def assert_lossless(kind: type[Speculator], count: int = DRAWS, **params: Any) -> None:
    found = draws(kind, count, **params)
    statistic, limit = chi_square(found, joint_law(next_token_law(**params)))
    assert statistic < limit


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("kind", [SampledChain, SampledTree, PointMassTree, Mixed])
def test_the_joint_law_of_three_tokens_is_the_targets(kind: type[Speculator]) -> None:
    assert_lossless(kind)


# Other engines: DeepSpec 31 (drafts drawn from 16-bit softmax, judged by another q).
def test_it_is_with_16_bit_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculators, "P", P.bfloat16())
    monkeypatch.setattr(speculators, "Q", Q.bfloat16())
    law = P.bfloat16().float().softmax(-1).double()
    statistic, limit = chi_square(draws(SampledChain), joint_law(law))
    assert statistic < limit


@pytest.mark.parametrize("params", FILTERS[-1:])
def test_it_is_with_filters_on_the_target_alone(params: dict[str, Any]) -> None:
    assert_lossless(SampledTree, **params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SampledChain, SampledTree, PointMassTree, Mixed])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_it_is_with_every_filter(kind: type[Speculator], params: dict[str, Any]) -> None:
    assert_lossless(kind, **params)


@pytest.fixture
def cost_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Costs that grow by steps, so that some drafts pay for themselves and others do not."""
    steps = tuple((BATCH + 500 * step, 100.0 * 1.3**step) for step in range(8))
    path = tmp_path / "costs.json"
    CostTable(steps, ((1, 1.0),), steps[-1][0], {}).save(path)
    monkeypatch.setattr(speculator, "about", lambda *_: {})
    return path


MODES = ["schedule:[[1,2000,1]]", "threshold:0.7", "auto"]
KINDS = [ConfidentChain, SampledChain, PointMassTree]


@pytest.mark.parametrize(
    ("kind", "adaptive", "count"),
    [
        *((*pair, 8000) for pair in zip(KINDS, MODES, strict=True)),
        *(
            pytest.param(kind, mode, DRAWS, marks=pytest.mark.slow)
            for kind in KINDS
            for mode in MODES
        ),
    ],
)
def test_it_is_when_only_drafts_that_pay_are_verified(
    cost_table: Path, kind: type[Speculator], adaptive: str, count: int
) -> None:
    options = {"adaptive": adaptive, "cost_table": str(cost_table)}
    assert_lossless(kind, count, adaptive=options)
    requests, _ = run_tables(kind, range(BATCH), adaptive=options)
    drafted, verified = (
        sum(getattr(request.stats, name) for request in requests)
        for name in ("drafted", "verified")
    )
    assert 0 < verified < 0.9 * drafted


def test_two_requests_of_one_batch_are_independent() -> None:
    law = next_token_law()
    found = draws(SampledChain, 2 * DRAWS)
    pairs = [[*left[:2], right[0]] for left, right in zip(found[::2], found[1::2], strict=True)]
    joint = law[0][:, None, None] * law[:, :, None] * law[0][None, None, :]
    statistic, limit = chi_square(pairs, joint)
    assert statistic < limit


@pytest.mark.parametrize("kind", [SampledChain, pytest.param(SampledTree, marks=pytest.mark.slow)])
def test_it_is_while_pages_are_short(kind: type[Speculator]) -> None:
    """Drafts are cut and requests preempted all the time, by their neighbours' lengths alone."""
    found, verified, drafted = [], 0, 0
    for start in range(0, DRAWS, BATCH):
        options = {"page_size": 1, "num_pages": int(2.6 * BATCH)}
        requests, pages = run_tables(kind, range(start, start + BATCH), **options)
        found += [request.output_token_ids[1:] for request in requests]
        verified += sum(request.stats.verified for request in requests)
        drafted += sum(request.stats.drafted for request in requests)
        assert pages.num_preemptions > BATCH // 20
    assert DRAWS // 4 < verified < drafted
    statistic, limit = chi_square(found, joint_law(next_token_law()))
    assert statistic < limit


class ForgetsQ(SampledChain):
    """Accepts a sampled draft with probability p instead of p / q: what a point mass would do."""

    def accept(
        self, plan: VerifyPlan, output: TargetOutput, roots: Any, packed: PackedRows
    ) -> AcceptResult | None:
        """See `Speculator.accept`."""
        if plan.probs is None:
            return None
        wrong = replace(plan, probs=torch.ones_like(plan.probs))
        return accept.accept(wrong, output.logits, roots, packed)


class WrongQ(SampledChain):
    """Records q at another temperature than the drafts were drawn at."""

    def propose(self, requests: Any) -> list[Any]:
        """See `Speculator.propose`."""
        drafts = super().propose(requests)
        for draft in drafts:
            draft.probs.copy_((draft.probs.log() * 0.7).softmax(-1))  # type: ignore[union-attr]
        return list(drafts)


class TrimsByItsOwnToken(SampledChain):
    """Verifies a draft or not by what the draft is: what the law forbids."""

    def plan(self, requests: Any) -> VerifyPlan:
        """See `Speculator.plan`."""
        for request in requests:
            if request.draft is not None and request.draft.tokens[0] % 2 == 1:
                request.max_drafts = 0
        return super().plan(requests)


class SizesByItsOwnTokens(SampledChain):
    """Sizes the budget of a round from the drafts it admits (DSpark paper, appendix A)."""

    def plan(self, requests: Any) -> VerifyPlan:
        """See `Speculator.plan`: later drafts are verified if the first is a likely one."""
        for request in requests:
            if request.draft is not None and request.draft.probs[0][request.draft.tokens[0]] < 0.3:
                request.max_drafts = 0
        return super().plan(requests)


BIASED = [ForgetsQ, WrongQ, TrimsByItsOwnToken, SizesByItsOwnTokens]


@pytest.mark.parametrize("kind", BIASED)
def test_a_biased_rule_is_detected(kind: type[Speculator]) -> None:
    statistic, limit = chi_square(draws(kind, 8000), joint_law(next_token_law()))
    assert statistic > limit


def test_judging_siblings_as_if_drawn_with_replacement_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accept, "_without", lambda q, token: q)
    statistic, limit = chi_square(draws(SampledTree, 8000), joint_law(next_token_law()))
    assert statistic > limit


def real_models(tmp_path: Path) -> tuple[Path, Path]:
    """Return a target of six tokens and a drafter that is the target with noise on its weights."""
    shape = {"vocab_size": 6, "initializer_range": 0.12}
    target = helpers.make_checkpoint(tmp_path / "target", "qwen3", **shape)
    return target, helpers.perturbed(target, tmp_path / "draft", 0.6)


def real_law(target: Path, prompt: list[int]) -> Tensor:
    """Return the joint law [6, 6] of the second and third token, given the most probable first."""
    model = helpers.load_reference(target)
    law = torch.zeros(6, 6, dtype=torch.float64)
    first = helpers.reference_logits(model, prompt)[-1].double().softmax(-1)
    for a in range(6):
        second = helpers.reference_logits(model, [*prompt, a])[-1].double().softmax(-1)
        law[a] = first[a] * second
    return law


def check_real_models(tmp_path: Path, count: int, acceptance: str) -> None:
    target, draft = real_models(tmp_path)
    prompt = [5, 2, 3]
    llm = helpers.make_llm(
        target, draft=str(draft), acceptance=acceptance, max_draft_len=3, max_num_seqs=500
    )
    pairs = []
    for _ in range(0, count, 500):
        params = helpers.greedy(4, temperature=1.0)
        outputs = helpers.token_ids(llm, [prompt] * 500, params)
        pairs += [[0, *tokens[:2]] for tokens in outputs]
    index = torch.tensor(pairs) @ torch.tensor([36, 6, 1])
    counts = index.bincount(minlength=36).double()
    expected = real_law(target, prompt).flatten() * len(pairs)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 77.0  # the 0.9999 quantile of chi-square with 35 degrees of freedom
    rates = llm.stats.acceptance_rates
    assert 0.3 < rates[0] < 0.95, "nothing, or everything, was accepted"


@pytest.mark.parametrize("acceptance", ["rejection", "shared-noise"])
def test_a_real_drafter_that_is_often_wrong_leaves_the_law_alone(
    tmp_path: Path, acceptance: str
) -> None:
    check_real_models(tmp_path, 4000, acceptance)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "shared-noise"])
def test_it_does_over_many_draws(tmp_path: Path, acceptance: str) -> None:
    check_real_models(tmp_path, 40_000, acceptance)


def real_joint_law(target: Path, prompt: list[int]) -> Tensor:
    """Return the joint law [6, 6, 6] of the first three tokens."""
    model = helpers.load_reference(target)
    law = real_law(target, prompt)[:, :, None].repeat(1, 1, 6)
    for a, b in itertools.product(range(6), repeat=2):
        logits = helpers.reference_logits(model, [*prompt, a, b])[-1]
        law[a, b] *= logits.double().softmax(-1)
    return law


def check_dspark(tmp_path: Path, count: int, speculator: str, **overrides: Any) -> None:
    """Draw many outputs of four tokens: a first one, and drafts of up to three."""
    shape = {"vocab_size": 6, "initializer_range": 0.12, "num_hidden_layers": 2}
    target = helpers.make_checkpoint(tmp_path / "target", "qwen3", **shape)
    shape = {"block_size": 4, "num_hidden_layers": 1, "target_layer_ids": [-1, 0]}
    draft = helpers.make_drafter(tmp_path / "dspark", target, **(shape | overrides))
    options = {"speculator": speculator.removesuffix("-ahead"), "acceptance": "rejection"}
    options |= {"max_draft_len": 4, "run_ahead": "on" if "ahead" in speculator else "off"}
    llm = helpers.make_llm(target, draft=str(draft), max_num_seqs=500, **options)
    prompt, found = [5, 2, 3], []
    for _ in range(0, count, 500):
        params = helpers.greedy(4, temperature=1.0)
        found += [tokens[:3] for tokens in helpers.token_ids(llm, [prompt] * 500, params)]
    law = real_joint_law(target, prompt)
    index = torch.tensor(found) @ torch.tensor([36, 6, 1])
    counts, expected = index.bincount(minlength=216).double(), law.flatten() * len(found)
    large = expected >= 5
    counts = torch.cat((counts[large], counts[~large].sum()[None]))
    expected = torch.cat((expected[large], expected[~large].sum()[None]))
    statistic = float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    freedom = len(counts) - 1
    assert freedom > 40 and statistic < quantile(freedom)
    assert 0.2 < llm.stats.acceptance_rates[0] < 0.95, "nothing, or everything, was accepted"


DSPARK: list[tuple[str, dict[str, Any]]] = [
    ("dspark", {}),
    ("dspark", {"markov_head_type": "gated"}),
    ("dspark", {"markov_head_type": "rnn"}),
    ("dspark-ahead", {}),
    ("dspark-tree", {}),
]


@pytest.mark.parametrize(("speculator", "overrides"), DSPARK, ids=str)
def test_dspark_leaves_the_joint_law_of_three_tokens_alone(
    tmp_path: Path, speculator: str, overrides: dict[str, Any]
) -> None:
    check_dspark(tmp_path, 2000, speculator, **overrides)


@pytest.mark.slow
@pytest.mark.parametrize(("speculator", "overrides"), DSPARK, ids=str)
def test_dspark_does_over_many_draws(
    tmp_path: Path, speculator: str, overrides: dict[str, Any]
) -> None:
    check_dspark(tmp_path, 40_000, speculator, **overrides)


@pytest.mark.parametrize("kind", [SampledChain, SampledTree, PointMassTree])
def test_drafts_are_accepted_and_rejected_often(kind: type[Speculator]) -> None:
    """Without this a speculator that drafts nothing would pass for lossless."""
    requests, _ = run_tables(kind, range(500))
    verified = sum(request.stats.offered[0] for request in requests)
    accepted = sum(request.stats.kept[0] for request in requests)
    assert verified >= 500 and 0.3 < accepted / verified < 0.95
