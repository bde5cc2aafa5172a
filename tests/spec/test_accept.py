"""Acceptance: paths that follow the target, rejection by the book, edges, and a kernel alike."""

import dataclasses

import pytest
import torch
from torch import Tensor

from nanospec import SamplingParams
from nanospec.engine.packing import pack
from nanospec.params import SamplingRows
from nanospec.spec import noise
from nanospec.spec.accept import accept, accept_reference, follow_reference
from nanospec.spec.plan import build_plan
from nanospec.spec.sampler import sampling_rows
from nanospec.types import AcceptResult, Draft, PackedRows, PlanKind, Request, Resources, VerifyPlan
from tests import helpers


def roots_of(requests: list[Request], logits: Tensor) -> SamplingRows:
    return sampling_rows(requests, logits.shape[1], logits.device)


CPU = torch.device("cpu")
TREE = [0, 0, 1, 1, 2, 3]  #  root: rows 1, 2; row 1: rows 3, 4; row 2: row 5; row 3: row 6


def planned(
    drafts: list[Draft | None], vocab_size: int, params: SamplingParams | None = None
) -> tuple[VerifyPlan, list[Request], PackedRows]:
    requests = [
        helpers.make_request(
            [0], params, seed=index, draft=draft, max_drafts=99, shares_noise=False
        )
        for index, draft in enumerate(drafts)
    ]
    counts = [request.num_planned for request in requests]
    resources = Resources(PlanKind.MASK, 64)
    plan = build_plan(requests, counts, resources=resources, vocab_size=vocab_size, device=CPU)
    for request in requests:
        request.pages = list(range(64))
    step = pack(plan, requests, [], page_size=1, scratch_slot=0, device=CPU)
    return plan, requests, step.rows


def outcome(result: AcceptResult) -> list[tuple[list[int], list[int]]]:
    """Return emitted tokens and path of each request."""
    return [
        (tokens[:count], path[:count])
        for tokens, path, count in zip(
            result.tokens.tolist(), result.path.tolist(), result.num_emitted.tolist(), strict=True
        )
    ]


def follow(draft: Draft | None, argmaxes: list[int]) -> tuple[list[int], list[int]]:
    plan, requests, packed = planned([draft], 10, SamplingParams(temperature=0))
    logits = torch.nn.functional.one_hot(torch.tensor(argmaxes), 10).float()
    return outcome(accept(plan, logits, roots_of(requests, logits), packed))[0]


@pytest.mark.parametrize(
    ("draft", "argmaxes", "tokens", "path"),
    [
        (None, [4], [4], [0]),
        (Draft([1, 2, 3]), [1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3]),
        (Draft([1, 2, 3]), [1, 9, 3, 4], [1, 9], [0, 1]),
        (Draft([1, 2, 3]), [9, 2, 3, 4], [9], [0]),
        (Draft([1, 2, 3, 4, 5, 6], TREE), [2, 0, 5, 0, 0, 7, 0], [2, 5, 7], [0, 2, 5]),
        (Draft([1, 2, 3, 4, 5, 6], TREE), [1, 3, 0, 6, 0, 0, 8], [1, 3, 6, 8], [0, 1, 3, 6]),
        (Draft([1, 2, 3, 4, 5, 6], TREE), [1, 4, 0, 0, 8, 0, 0], [1, 4, 8], [0, 1, 4]),
        (Draft([1, 1], [0, 0]), [1, 7, 8], [1, 7], [0, 1]),  # of equal siblings the first
        (Draft([1, 2], [0, -1]), [2, 5, 6], [2], [0]),  # a lookahead row is never accepted
    ],
)
def test_the_path_follows_the_argmax(
    draft: Draft | None, argmaxes: list[int], tokens: list[int], path: list[int]
) -> None:
    assert follow(draft, argmaxes) == (tokens, path)


# Other engines: openvino.genai 4190 (rejection one iteration late): a plain loop says the same.
def by_the_book(
    plan: VerifyPlan, index: int, p: Tensor, coins: Tensor, key: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Judge one request's drafts in float64, one child at a time."""
    assert plan.row_counts is not None and plan.probs is not None
    start = sum(plan.row_counts[:index])
    row, path, tokens = 0, [0], []
    while True:
        rest = p[start + row].double()
        q: Tensor | None = None
        for child in range(1, plan.row_counts[index]):
            if int(plan.parents[index, child]) != row:
                continue
            token = int(plan.tokens[index, child])
            if q is None:
                q = plan.probs[index, child - 1].double().clone()
            if q[token] > 0 and coins[index, child] * q[token] < rest[token]:
                row = child
                path.append(child)
                tokens.append(token)
                break
            left = (rest - q).clamp(min=0)
            rest = left / left.sum() if left.sum() > 0 else rest
            q[token] = 0
            q = q / q.sum() if q.sum() > 0 else q
        else:
            seed, position = torch.tensor([key[0]]), torch.tensor([key[1] + len(tokens)])
            gumbel = noise.gumbel(seed, position, noise.TARGET, p.shape[1])[0]
            return [*tokens, int((rest.log() + gumbel).argmax())], path


def random_case(
    seed: int, vocab_size: int, device: torch.device = CPU
) -> tuple[VerifyPlan, Tensor, Tensor, Tensor, SamplingRows, Tensor]:
    """Return what `accept_reference` takes: trees, chains and point masses in one batch."""
    generator = torch.Generator().manual_seed(seed)
    drafts: list[Draft | None] = []
    for index in range(6):
        size = int(torch.randint(0, 8, (1,), generator=generator))
        parents = [int(torch.randint(row, (1,), generator=generator)) for row in range(1, size + 1)]
        at_row = torch.rand(size + 1, vocab_size, generator=generator) ** 3
        at_row = at_row / at_row.sum(-1, keepdim=True)
        tokens: list[int] = []
        for row, parent in enumerate(parents, start=1):  # siblings without replacement
            q = at_row[parent].clone()
            q[[t for t, other in zip(tokens, parents, strict=False) if other == parent]] = 0
            drawn = torch.multinomial(q if q.sum() > 0 else at_row[parent], 1, generator=generator)
            tokens.append(int(drawn))
            assert len(tokens) == row
        probs = at_row[parents] if index % 3 < 2 and size else None
        drafts.append(Draft(tokens, parents, probs=probs) if size else None)
    if all(draft is None or draft.probs is None for draft in drafts):
        drafts[0] = Draft([0], probs=torch.full((1, vocab_size), 1 / vocab_size))
    plan, requests, packed = planned(drafts, vocab_size)
    p = torch.rand(plan.num_tokens, vocab_size, generator=generator) ** 3
    p = p / p.sum(-1, keepdim=True)
    targets = torch.randint(0, vocab_size, (plan.num_tokens,), generator=generator)
    coins = torch.rand(plan.num_reqs, plan.max_rows, generator=generator)
    roots = sampling_rows(requests, vocab_size, CPU)
    moved = {name: getattr(roots, name) for name in SamplingRows.__slots__}
    for name, value in moved.items():
        if isinstance(value, Tensor):
            moved[name] = value.to(device)
    rest = (p.to(device), targets.to(device), coins.to(device))
    return helpers.plan_to(plan, device), *rest, SamplingRows(**moved), packed.offsets.to(device)


@pytest.mark.parametrize("seed", range(40))
def test_rejection_follows_the_rule_child_by_child(seed: int) -> None:
    plan, p, targets, coins, roots, offsets = random_case(seed, 5 + seed % 3)
    got = outcome(accept_reference(plan, p, targets, coins, roots, offsets))
    assert plan.is_sampled is not None
    point_masses = outcome(follow_reference(plan, targets, offsets))
    for index, is_sampled in enumerate(plan.is_sampled.tolist()):
        want = by_the_book(plan, index, p, coins, (index, 0)) if is_sampled else point_masses[index]
        assert got[index] == want


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("vocab_size", [5, 37, 300])
def test_accept_kernels_match_the_reference(
    seed: int, vocab_size: int, device: torch.device
) -> None:
    from nanospec.spec import accept_triton

    case = random_case(seed, vocab_size, device)
    assert outcome(accept_triton.accept(*case)) == outcome(accept_reference(*case))
    plan, _, targets, _, _, offsets = case
    follow_got = outcome(accept_triton.follow(plan, targets, offsets))
    assert follow_got == outcome(follow_reference(plan, targets, offsets))


# Found while rounds were made to run ahead: a plan takes the first rows of each request's q as they
# lie among those of a whole batch.
@pytest.mark.parametrize("seed", range(8))
def test_q_may_be_part_of_a_wider_batch(seed: int, device: torch.device) -> None:
    from nanospec.spec import accept_triton

    plan, *rest = random_case(seed, 37, device)
    assert plan.probs is not None
    wide = torch.rand(plan.num_reqs, plan.max_rows + 3, 37, device=device)
    wide[:, : plan.max_rows - 1] = plan.probs
    part = dataclasses.replace(plan, probs=wide[:, : plan.max_rows - 1])
    assert outcome(accept_triton.accept(part, *rest)) == outcome(accept_reference(plan, *rest))


def run_accept(
    draft: Draft, p: list[list[float]], coin: float, device: torch.device
) -> list[tuple[list[int], list[int]]]:
    """Run reference and kernel with every coin alike; they must agree."""
    from nanospec.spec import accept_triton

    probs = torch.tensor(p)
    plan, requests, packed = planned([draft], probs.shape[1])
    plan = helpers.plan_to(plan, device)
    roots = sampling_rows(requests, probs.shape[1], device)
    coins = torch.full((1, plan.max_rows), coin, device=device)
    targets = torch.zeros(len(probs), dtype=torch.int64, device=device)
    case = (plan, probs.to(device), targets, coins, roots, packed.offsets.to(device))
    result = outcome(accept_reference(*case))
    assert outcome(accept_triton.accept(*case)) == result
    return result


LARGEST = 1 - 2**-24


# Other engines: jaymody 5 (q equal to p gave NaN).
def test_q_equal_to_p_accepts_whatever_the_coin(device: torch.device) -> None:
    law = [0.2, 0.3, 0.5]
    draft = Draft([2, 1], probs=torch.tensor([law, law]))
    ((tokens, path),) = run_accept(draft, [law, law, [1.0, 0.0, 0.0]], LARGEST, device)
    assert (tokens, path) == ([2, 1, 0], [0, 1, 2])


def test_a_zero_residual_falls_back_to_p(device: torch.device) -> None:
    # q is p but for rounding, and the coin is 1: what is left of p - q is nothing.
    law = torch.tensor([0.25, 0.75])
    ((tokens, path),) = run_accept(
        Draft([1], probs=law[None]), [law.tolist(), [0.0, 1.0]], 1.0, device
    )
    assert path == [0] and tokens[0] in (0, 1)


def test_a_draft_the_target_excludes_is_rejected_with_its_residual(device: torch.device) -> None:
    # p = (.7, .3, 0), q = (.5, .25, .25): what is left is (.2, .05, 0); token 2 never comes.
    draft = Draft([2], probs=torch.tensor([[0.5, 0.25, 0.25]]))
    for coin in (0.0, 0.5, LARGEST):
        ((tokens, path),) = run_accept(draft, [[0.7, 0.3, 0.0], [1, 0, 0]], coin, device)
        assert path == [0] and tokens[0] in (0, 1)


def test_a_draft_that_q_excludes_is_never_accepted(device: torch.device) -> None:
    draft = Draft([1], probs=torch.tensor([[1.0, 0.0]]))
    ((_, path),) = run_accept(draft, [[0.5, 0.5], [0.5, 0.5]], 0.0, device)
    assert path == [0]


def test_siblings_that_exhaust_q_leave_the_rest_to_p(device: torch.device) -> None:
    q = torch.tensor([0.6, 0.4, 0.0])
    draft = Draft([0, 1], parents=[0, 0], probs=torch.stack((q, q)))
    ((tokens, path),) = run_accept(draft, [[0.0, 0.0, 1.0]] * 3, LARGEST, device)
    assert (tokens, path) == ([2], [0])


# Other engines: transformers 47932 and vllm 6719 (tiny T overflows), flashinfer 384 (-inf rows).
@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-6, 1e-5])
def test_tiny_temperatures_judge_sampled_drafts_greedily(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3e4, -3e4], [5.0, 1.0, 2.0], [-torch.inf] * 3])
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=1e-5, top_p=0.0),
        SamplingParams(temperature=1e-5, top_k=1),
    ):
        q = torch.tensor([[0.1, 0.8, 0.1], [1.0, 0.0, 0.0]])
        plan, requests, packed = planned([Draft([1, 0], probs=q)], 3, params)
        ((tokens, path),) = outcome(accept(plan, logits, roots_of(requests, logits), packed))
        assert tokens[:2] == [1, 0] and path == [0, 1, 2] and 0 <= tokens[2] < 3


# Other engines: flashinfer 879 (counts exceed the limit over repeated calls).
def test_no_more_than_was_drafted_is_accepted_over_repeated_calls(device: torch.device) -> None:
    for seed in range(20):
        case = random_case(seed, 6, device)
        for _ in range(3):
            result = accept_reference(*case)
            assert bool((result.num_emitted <= case[0].num_rows).all())
            assert bool((result.num_emitted >= 1).all())
