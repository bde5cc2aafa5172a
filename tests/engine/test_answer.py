"""What a round gives is summed up alike by kernel and reference, and read request by request."""

from dataclasses import replace

import pytest
import torch

from nanospec.engine.answer import Answer, Outcome, sum_up_reference
from nanospec.types import AcceptResult, PlanKind, VerifyPlan
from tests import helpers


def random_round(seed: int) -> tuple[VerifyPlan, AcceptResult, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    num_reqs, max_rows = 1 + seed % 5, (1, 2, 8, 17)[seed % 4]
    num_rows = integers(1, max_rows + 1, num_reqs)
    shape = (num_reqs, max_rows)
    plan = VerifyPlan(
        kind=PlanKind.TREE,
        tokens=integers(0, 99, *shape),
        parents=integers(-1, max_rows, *shape),
        num_rows=num_rows,
        num_tokens=int(num_rows.sum()),
        row_counts=None,
        num_masked=0,
    )
    num_emitted = (integers(0, max_rows, num_reqs) % num_rows) + 1
    result = AcceptResult(integers(0, 99, *shape), num_emitted, integers(0, max_rows, *shape))
    return plan, result, integers(1, 9, num_reqs) if seed % 2 else None


@pytest.mark.parametrize("seed", range(12))
def test_kernel_matches_the_reference(seed: int, device: torch.device) -> None:
    from nanospec.engine import answer_triton

    plan, result, ahead = random_round(seed)
    want = sum_up_reference(plan, result, ahead)
    there = AcceptResult(*(t.to(device) for t in (result.tokens, result.num_emitted, result.path)))
    got = answer_triton.sum_up(
        helpers.plan_to(plan, device), there, None if ahead is None else ahead.to(device)
    )
    assert [each.tolist() for each in got] == [each.tolist() for each in want]


def a_plan(kind: PlanKind) -> VerifyPlan:
    return VerifyPlan(
        kind=kind,
        tokens=torch.tensor([[5, 6, 7], [8, 0, 0]]),
        parents=torch.tensor([[-1, 0, 1], [-1, 0, 0]]),
        num_rows=torch.tensor([3, 1]),
        num_tokens=4,
        row_counts=[3, 1],
        num_masked=0,
    )


@pytest.mark.parametrize("kind", PlanKind)
def test_the_host_reads_what_was_emitted_and_nothing_behind(kind: PlanKind) -> None:
    plan = a_plan(kind)
    tokens, path = torch.tensor([[6, 9, 77], [4, 77, 77]]), torch.tensor([[0, 1, 77], [0, 77, 77]])
    result = AcceptResult(tokens, torch.tensor([2, 1]), path)
    roots, num_tokens, values = sum_up_reference(plan, result, torch.tensor([3, 0]))
    assert (roots.tolist(), num_tokens.tolist()) == ([9, 4], [5, 1])
    want = Outcome(counts=[3, 1], depths=[2, 0], tokens=[[6, 9], [4]], path=[[0, 1], [0]])
    assert Answer(plan, values).read() == want


def test_paths_and_depths_of_trees_are_those_of_their_rows() -> None:
    plan = replace(a_plan(PlanKind.MASK), parents=torch.tensor([[-1, 0, 0], [-1, -1, 1]]))
    plan = replace(plan, num_rows=torch.tensor([3, 3]), num_tokens=6, row_counts=[3, 3])
    tokens, path = torch.tensor([[6, 9, 77], [4, 77, 77]]), torch.tensor([[0, 2, 77], [0, 77, 77]])
    result = AcceptResult(tokens, torch.tensor([2, 1]), path)
    found = Answer(plan, sum_up_reference(plan, result, None)[2]).read()
    assert (found.path, found.depths) == ([[0, 2], [0]], [1, 0])


def test_a_round_of_nobody_has_no_outcome() -> None:
    plan = replace(
        a_plan(PlanKind.CHAIN),
        tokens=torch.zeros(0, 1, dtype=torch.int64),
        parents=torch.zeros(0, 1, dtype=torch.int64),
        num_rows=torch.zeros(0, dtype=torch.int64),
    )
    nothing = torch.zeros(0, 1, dtype=torch.int64)
    result = AcceptResult(nothing, nothing[:, 0], nothing)
    values = sum_up_reference(plan, result, None)[2]
    assert Answer(plan, values).read() == Outcome([], [], [], [])
