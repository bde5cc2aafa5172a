"""Packed rows have the right positions, slots, words and logit rows; the kernel packs alike."""

import dataclasses

import pytest
import torch

from nanospec.engine.packing import pack, pack_rows_reference
from nanospec.spec.plan import build_plan
from nanospec.types import Draft, PlanKind, Request, Resources, Segment, VerifyPlan
from tests import helpers

CPU = torch.device("cpu")
ANY = Resources(PlanKind.MASK, 64)


def plan_of(requests: list[Request]) -> VerifyPlan:
    counts = [request.num_planned for request in requests]
    return build_plan(requests, counts, resources=ANY, vocab_size=100, device=CPU)


def drafting(tokens: list[int], pages: list[int], draft: Draft | None = None) -> Request:
    """Return a request whose root is pending."""
    request: Request = helpers.make_request(tokens)
    request.kv_len, request.pages, request.draft = len(tokens) - 1, pages, draft
    request.max_drafts = 99
    return request


# Other engines: llama.cpp 26478 (positions drift apart from the counters).
def test_chunks_come_first_then_roots_and_drafts() -> None:
    chunk = helpers.make_request([20, 21, 22])
    chunk.pages = [7]
    first = drafting([10, 11, 12, 13], [5, 2], Draft([14, 15]))
    second = drafting([30], [9])
    step = pack(
        plan_of([first, second]),
        [first, second],
        [Segment(chunk, 2)],
        page_size=4,
        scratch_slot=400,
        device=CPU,
    )
    batch = step.batch
    assert batch.token_ids.tolist() == [20, 21, 13, 14, 15, 30]
    assert batch.positions.tolist() == [0, 1, 3, 4, 5, 0]
    assert batch.slots.tolist() == [28, 29, 5 * 4 + 3, 2 * 4, 2 * 4 + 1, 36]
    assert batch.lens() == ([2, 3, 1], [2, 6, 1])
    assert batch.logit_rows.tolist() == [2, 3, 4, 5]
    assert batch.num_masked == 0 and step.first_row == 2
    assert step.rows.request.tolist() == [0, 0, 0, 1]
    assert step.rows.depth.tolist() == [0, 1, 2, 0]


def test_rows_of_a_tree_stand_at_their_depth_and_see_their_ancestors() -> None:
    #   root - 1 - 3
    #       \\ 2 - 4
    request = drafting([8, 9], [0, 1, 2], Draft([1, 2, 3, 4], parents=[0, 0, 1, 2]))
    step = pack(plan_of([request]), [request], [], page_size=4, scratch_slot=400, device=CPU)
    assert step.rows.positions.tolist() == [1, 2, 2, 3, 3]
    assert step.rows.slots.tolist() == [1, 2, 3, 4, 5]
    assert step.rows.words.tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101]
    assert step.batch.num_masked == 1


def test_rows_that_the_host_reserved_but_the_device_does_not_use_go_to_scratch() -> None:
    request = drafting([8, 9], [0, 1], Draft([1, 2, 3]))
    plan = plan_of([request])
    fewer = dataclasses.replace(plan, num_rows=torch.tensor([2]), row_counts=None)
    rows = pack_rows_reference(
        fewer, torch.tensor([1]), torch.tensor([[0, 1]]), page_size=4, scratch_slot=400
    )
    assert rows.slots.tolist() == [1, 2, 400, 400]
    assert rows.token_ids.tolist() == [9, 1, 0, 0]
    assert rows.offsets.tolist() == [0, 2]


def random_plan(seed: int) -> tuple[VerifyPlan, torch.Tensor, torch.Tensor]:
    """Return a plan of chains, trees and lookahead rows, with lengths and page tables."""
    generator = torch.Generator().manual_seed(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    requests = []
    for index in range(1 + below(5)):
        size = below(12) if seed % 7 else 63
        tokens = [below(100) for _ in range(size)]
        kind = below(3 if seed % 2 else 2)
        parents = [below(row) for row in range(1, size + 1)] if kind else None
        positions = visibility = None
        if kind == 2:
            parents = [-1] * size
            positions = [below(9) for _ in range(size)]
            visibility = [[below(2) == 1 for _ in range(size + 1)] for _ in range(size + 1)]
        draft = Draft(tokens, parents, positions=positions, visibility=visibility)
        request = drafting([below(100) for _ in range(1 + below(20))], [], draft if size else None)
        request.request_id = index
        requests.append(request)
    kv_lens = torch.tensor([len(request.tokens) - 1 for request in requests])
    tables = torch.stack([torch.randperm(40, generator=generator) for _ in requests])
    return plan_of(requests), kv_lens, tables


@pytest.mark.parametrize("seed", range(14))
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pack_kernel_matches_the_reference(seed: int, page_size: int, device: torch.device) -> None:
    from nanospec.engine import packing_triton

    plan, kv_lens, tables = random_plan(seed)
    if page_size == 1:
        tables = tables.repeat(1, 4)
    plan = helpers.plan_to(plan, device)
    arguments = (plan, kv_lens.to(device), tables.to(device))
    options = {"page_size": page_size, "scratch_slot": 999}
    want = pack_rows_reference(*arguments, **options)
    got = packing_triton.pack_rows(*arguments, **options)
    for name in want.__slots__:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0)
