"""The law of the output is the target's, whatever is drafted: counted, through whole rounds.

Each test draws thousands of outputs of three tokens after a certain first one, over one to three
rounds, and compares their joint law with the product of the target's own. Seeds are fixed, so the
outcome is too. A rule that is known to be biased must fail by a factor, or the test says nothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.cudagraph.runner import TargetOutput
from nanospec.spec import accept, speculator
from nanospec.spec.adaptive import Costs, Policy, Verdict
from nanospec.spec.budget import CostTable
from nanospec.spec.sampler import probabilities, sampling_rows
from nanospec.spec.speculator import Speculator
from nanospec.types import AcceptResult, Draft, PackedRows, Request, VerifyPlan
from tests import helpers, speculators
from tests.speculators import (
    SMALL,
    ConfidentChain,
    ConfidentTree,
    InGroups,
    LongPaperChain,
    Mixed,
    P,
    PaperChain,
    PointMassTree,
    Q,
    SampledChain,
    SampledTree,
    TiedChain,
    coin,
    run_tables,
)

DRAWS, BATCH = 20_000, 1000
COUNTS = [4500, pytest.param(DRAWS, marks=pytest.mark.slow)]  # in the suite, and at leisure
BEYOND = 5  # tokens that may come after the ones looked at, so that whole trees are verified


def next_token_law(**params: Any) -> Tensor:
    """Return [V, V]: what follows each token, after the filters."""
    own = SamplingParams(**({"temperature": 1.0} | params))
    request = helpers.make_request([0], own)
    rows = sampling_rows([request] * SMALL, SMALL, torch.device("cpu"))
    return probabilities(P, rows).double()


def joint_law(law: Tensor) -> Tensor:
    """Return [V, V, V]: the three tokens after the certain first one, which is 0."""
    return law[0][:, None, None] * law[:, :, None] * law[None, :, :]


def run_many(kind: type[Speculator], count: int, **options: Any) -> list[Request]:
    """Run many requests to their end, `BATCH` together."""
    done = []
    for start in range(0, count, BATCH):
        done += run_tables(kind, range(start, start + min(BATCH, count - start)), **options)[0]
    return done


def draws(kind: type[Speculator], count: int = DRAWS, **params: Any) -> list[list[int]]:
    """Return the three tokens after the first of many outputs."""
    return three_tokens(run_many(kind, count, **({"beyond": BEYOND} | params)))


def three_tokens(requests: Sequence[Request]) -> list[list[int]]:
    """Return what comes after the first token, which is 0."""
    found = [request.output_token_ids for request in requests]
    assert all(len(tokens) >= 4 and tokens[0] == 0 for tokens in found)
    return [tokens[1:4] for tokens in found]


def chi_square(found: list[list[int]], law: Tensor) -> tuple[float, float]:
    """Return the statistic of cells with 5 expected or more, and its 0.9999 quantile.

    Args:
        found: draws of some tokens.
        law: [V] or [V, V] or .., how probable the first, the first two, .. are.
    """
    places = torch.tensor([SMALL**place for place in reversed(range(law.dim()))])
    index = torch.tensor(found)[:, : law.dim()] @ places
    counts = index.bincount(minlength=law.numel()).double()
    expected = law.flatten() * len(found)
    assert float(counts[expected == 0].sum()) == 0, "something outside the support was drawn"
    large = expected >= 5
    counts = torch.cat((counts[large], counts[~large].sum()[None]))
    expected = torch.cat((expected[large], expected[~large].sum()[None]))
    live = expected > 0
    statistic = float(((counts - expected)[live] ** 2 / expected[live]).sum())
    return statistic, quantile(int(live.sum()) - 1)


def strain(found: list[list[int]], law: Tensor) -> float:
    """Return the statistic by its limit: the largest of the first token's, the first two's, .."""
    worst = 0.0
    for size in range(1, law.dim() + 1):
        behind = tuple(range(size, law.dim()))
        statistic, limit = chi_square(found, law.sum(behind) if behind else law)
        worst = max(worst, statistic / limit)
    return worst


def quantile(freedom: int) -> float:
    """Return the 0.9999 quantile of chi-square: Wilson and Hilferty's approximation."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


def assert_lossless(kind: type[Speculator], count: int = DRAWS, **params: Any) -> None:
    assert strain(draws(kind, count, **params), joint_law(next_token_law(**params))) < 1


def assert_lossless_with_less(kind: type[Speculator], count: int, **options: Any) -> None:
    """Check the law where a policy leaves out some of the drafts that are made, and not all."""
    requests = run_many(kind, count, **({"beyond": BEYOND} | options))
    assert strain(three_tokens(requests), joint_law(next_token_law())) < 1
    drafted = sum(request.stats.drafted for request in requests)
    verified = sum(request.stats.verified for request in requests)
    assert 0 < verified < 0.9 * drafted


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [SampledChain, SampledTree, PointMassTree, Mixed])
def test_the_joint_law_of_three_tokens_is_the_targets(kind: type[Speculator], count: int) -> None:
    assert_lossless(kind, count)


# Other engines: DeepSpec 31 (drafts drawn from 16-bit softmax, judged by another q).
@pytest.mark.parametrize("count", COUNTS)
def test_it_is_with_16_bit_logits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(speculators, "P", P.bfloat16())
    monkeypatch.setattr(speculators, "Q", Q.bfloat16())
    law = P.bfloat16().float().softmax(-1).double()
    assert strain(draws(SampledChain, count), joint_law(law)) < 1


@pytest.mark.parametrize("params", FILTERS[-1:])
def test_it_is_with_filters_on_the_target_alone(params: dict[str, Any]) -> None:
    assert_lossless(SampledTree, 4500, **params)


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


MODES = ["schedule:[[1,2000,1]]", "threshold:0.4", "threshold:0.7", "auto"]
KINDS = [ConfidentChain, ConfidentTree, SampledChain, SampledTree, PointMassTree]


@pytest.mark.parametrize(
    ("kind", "adaptive", "count"),
    [
        (ConfidentChain, MODES[0], 4000),
        (ConfidentTree, MODES[0], 4000),
        (ConfidentTree, MODES[1], 4000),
        (SampledChain, MODES[2], 4000),
        (SampledTree, MODES[3], 4000),
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
    assert_lossless_with_less(kind, count, adaptive=options)


def tiers(*verify: tuple[int, float]) -> CostTable:
    """Return costs of padded forwards, beside which drafting costs next to nothing."""
    return CostTable(verify, ((1, 0.001),), verify[-1][0], {})


def shared(policy: type[Policy], size: int, table: CostTable) -> dict[str, Any]:
    """Return the option that gives each `size` requests a budget of their own."""
    return {"policy": lambda: InGroups(lambda: policy(table), size)}


# In a batch of thousands the drafts of one request hardly move the budget, and a biased budget
# would not show. Here they do: speculator, requests that share a budget, costs.
SHARED = [
    (ConfidentChain, 1, tiers((1, 1.0), (2, 1.95), (3, 2.3), (4, 4.0))),
    (ConfidentChain, 2, tiers((2, 1.0), (6, 2.3), (8, 4.0))),
    (ConfidentTree, 2, tiers((2, 1.0), (8, 2.6), (14, 8.0))),
    (TiedChain, 2, tiers((2, 1.0), (3, 1.01), (8, 100.0))),  # one draft, and several as good
]


@pytest.mark.parametrize(
    "count", [2000, pytest.param(DRAWS, marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize(("kind", "size", "table"), SHARED)
def test_it_is_where_few_requests_share_a_budget(
    kind: type[Speculator], size: int, table: CostTable, count: int
) -> None:
    assert_lossless_with_less(kind, count, **shared(Costs, size, table))


@pytest.mark.parametrize(("kind", "size", "table"), SHARED)
def test_groups_that_share_forwards_are_as_if_each_had_an_engine(
    kind: type[Speculator], size: int, table: CostTable
) -> None:
    together = run_many(kind, 16, max_tokens=8, **shared(Costs, size, table))
    for start in range(0, 16, size):
        seeds = range(start, start + size)
        alone, _ = run_tables(kind, seeds, max_tokens=8, policy=lambda: Costs(table))
        for one, other in zip(alone, together[start : start + size], strict=True):
            assert one.output_token_ids == other.output_token_ids
            assert one.stats.verified == other.stats.verified


class SizesByThisRound(Costs):
    """Sizes a round's budget by the survivals it then chooses from (DSpark paper, appendix A)."""

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """See `Policy.admit`. Asked twice, the second time it takes this round for earlier."""
        most = [request.max_drafts for request in requests]
        super().admit(requests, num_other_rows, room)
        for request, own in zip(requests, most, strict=True):
            request.max_drafts = own
        return super().admit(requests, num_other_rows, room)


class TiesGoByTokens(Costs):
    """Of drafts that survive equally, verifies those whose tokens have the lowest ids."""

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """See `Policy.admit`."""
        for request in requests:
            draft = request.draft
            if draft is not None and draft.survival is not None:
                pairs = zip(draft.survival, draft.tokens, strict=True)
                survival = [float(alive) - 1e-5 * int(token) for alive, token in pairs]
                request.draft = replace(draft, survival=survival)
        return super().admit(requests, num_other_rows, room)


@pytest.mark.parametrize(
    ("policy", "kind", "size", "table"),
    [
        (SizesByThisRound, *SHARED[0]),
        pytest.param(SizesByThisRound, *SHARED[1], marks=pytest.mark.slow),
        (SizesByThisRound, *SHARED[2]),
        (TiesGoByTokens, *SHARED[3]),
    ],
)
def test_a_biased_policy_is_detected(
    policy: type[Policy], kind: type[Speculator], size: int, table: CostTable
) -> None:
    found = draws(kind, 2000, **shared(policy, size, table))
    assert strain(found, joint_law(next_token_law())) > 2


@pytest.mark.parametrize(("policy", "share"), [(Costs, 0.7), (SizesByThisRound, 0.85)])
def test_the_example_of_the_paper_comes_out_as_the_paper_says(
    policy: type[Policy], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSpark, appendix A: a budget sized by the second draft's confidence gives (.85, .15)."""
    monkeypatch.setattr(speculators, "P", coin(0.7))
    monkeypatch.setattr(speculators, "Q", coin(0.5))
    table = tiers((1, 1.0), (2, 1 / 0.5), (3, 1 / 0.45))
    requests = run_many(PaperChain, 1000, **shared(policy, 1, table))
    found = [[request.output_token_ids[1]] for request in requests]  # the first that is drafted
    for law in (0.7, 0.85):
        found_strain = strain(found, coin(law)[0].softmax(-1).double())
        assert found_strain < 1 if law == share else found_strain > 2


@pytest.mark.parametrize(("policy", "is_right"), [(Costs, True), (SizesByThisRound, False)])
def test_it_is_in_rounds_whose_budget_an_earlier_one_sized(
    policy: type[Policy], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of tokens of longer outputs, of one draft or of three, as it was the round before."""
    monkeypatch.setattr(speculators, "P", coin(0.6))
    monkeypatch.setattr(speculators, "Q", coin(0.5))
    options = shared(policy, 1, tiers((2, 1.0), (4, 1.5)))
    requests = run_many(LongPaperChain, 500, max_tokens=12, beyond=BEYOND, **options)
    pairs = [
        request.output_token_ids[at : at + 2] for request in requests for at in range(2, 12, 2)
    ]
    law = coin(0.6)[0].softmax(-1).double()
    found = strain(pairs, law[:, None] * law)
    assert found < 1 if is_right else found > 2
    rounds = sum(request.stats.rounds for request in requests)
    assert 1.2 * rounds < sum(request.stats.verified for request in requests) < 2.8 * rounds


@pytest.mark.parametrize("count", COUNTS)
def test_two_requests_of_one_batch_are_independent(count: int) -> None:
    law = next_token_law()
    found = draws(SampledChain, 2 * count)
    pairs = [[*left[:2], right[0]] for left, right in zip(found[::2], found[1::2], strict=True)]
    joint = law[0][:, None, None] * law[:, :, None] * law[0][None, None, :]
    statistic, limit = chi_square(pairs, joint)
    assert statistic < limit


@pytest.mark.parametrize("kind", [SampledChain, pytest.param(SampledTree, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", COUNTS)
def test_it_is_while_pages_are_short(kind: type[Speculator], count: int) -> None:
    """Drafts are cut and requests preempted all the time, by their neighbours' lengths alone."""
    found, verified, drafted = [], 0, 0
    for start in range(0, count, BATCH):
        options = {"page_size": 1, "num_pages": int(2.6 * BATCH)}
        requests, pages = run_tables(kind, range(start, start + BATCH), **options)
        found += [request.output_token_ids[1:] for request in requests]
        verified += sum(request.stats.verified for request in requests)
        drafted += sum(request.stats.drafted for request in requests)
        assert pages.num_preemptions > BATCH // 20
    assert count // 4 < verified < drafted
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


class DropsByItsOwnToken(SampledChain):
    """Keeps a draft or not by what the draft is: what the law forbids."""

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        return None if tokens[0] % 2 == 1 else super().draft(request, tokens, probs)


class SurvivesByItsOwnTokens(SampledChain):
    """Says how probable its own tokens are, where only those before them may be known."""

    knows_survival = True

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size = request.max_drafts
        drawn = probs[range(size), tokens[:size]]
        return Draft(tokens[:size], probs=probs[:size], survival=drawn.cumprod(0).tolist())


BIASED: list[tuple[type[Speculator], dict[str, Any]]] = [
    (ForgetsQ, {}),
    (WrongQ, {}),
    (DropsByItsOwnToken, {}),
    (SurvivesByItsOwnTokens, {"adaptive": {"adaptive": "threshold:0.3"}}),
]


@pytest.mark.parametrize(
    ("kind", "options"), BIASED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_biased_rule_is_detected(kind: type[Speculator], options: dict[str, Any]) -> None:
    assert strain(draws(kind, 2000, **options), joint_law(next_token_law())) > 2


def test_judging_siblings_as_if_drawn_with_replacement_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accept, "_without", lambda q, token: q)
    assert strain(draws(SampledTree, 2000), joint_law(next_token_law())) > 2


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


@pytest.mark.parametrize(
    "acceptance", ["rejection", pytest.param("shared-noise", marks=pytest.mark.slow)]
)
def test_a_real_drafter_that_is_often_wrong_leaves_the_law_alone(
    tmp_path: Path, acceptance: str
) -> None:
    check_real_models(tmp_path, 2500, acceptance)


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
