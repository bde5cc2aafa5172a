"""Packed rows have the right positions, slots, words and logit rows; the kernel packs alike."""

import dataclasses
from typing import Any

import pytest
import torch

from nanospec.attention.batch import ForwardBatch
from nanospec.cudagraph.buckets import fill_buffers
from nanospec.engine.packing import Segments, pack, pack_reference
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
    assert batch.num_masked == 0 and step.num_rows == 6
    assert step.rows.request.tolist() == [0, 0, 0, 1]
    assert step.rows.depth.tolist() == [0, 1, 2, 0]


def test_rows_of_a_tree_stand_at_their_depth_and_see_their_ancestors() -> None:
    #   root - 1 - 3
    #       \\ 2 - 4
    request = drafting([8, 9], [0, 1, 2], Draft([1, 2, 3, 4], parents=[0, 0, 1, 2]))
    step = pack(plan_of([request]), [request], [], page_size=4, scratch_slot=400, device=CPU)
    assert step.batch.positions.tolist() == [1, 2, 2, 3, 3]
    assert step.batch.slots.tolist() == step.rows.slots.tolist() == [1, 2, 3, 4, 5]
    assert step.batch.words is not None and step.batch.num_masked == 1
    assert step.batch.words.tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101]


def test_rows_that_the_host_reserved_but_the_device_does_not_use_go_to_scratch() -> None:
    request = drafting([8, 9], [0, 1], Draft([1, 2, 3]))
    plan = plan_of([request])
    fewer = dataclasses.replace(plan, num_rows=torch.tensor([2]), row_counts=None)
    step = pack(fewer, [request], [], page_size=4, scratch_slot=400, device=CPU)
    assert step.rows.slots.tolist() == step.batch.slots.tolist() == [1, 2, 400, 400]
    assert step.batch.token_ids.tolist() == [9, 1, 0, 0]
    assert step.rows.offsets.tolist() == step.batch.qo_indptr.tolist() == [0, 2]


def random_plan(
    seed: int, num_reqs: int | None = None, *, is_chain: bool = False
) -> tuple[VerifyPlan, Segments]:
    """Return a plan and its segments beside some chunks, of which there are some without requests.

    Args:
        seed: of all that follows.
        num_reqs: R; None: a few.
        is_chain: whether drafts are chains alone, or also trees and lookahead rows.
    """
    generator = torch.Generator().manual_seed(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    requests = []
    for index in range(1 + below(5) if num_reqs is None else num_reqs):
        size = below(12) if seed % 7 else 63
        tokens = [below(100) for _ in range(size)]
        kind = 0 if is_chain else below(3 if seed % 2 else 2)
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
    lens = [1 + below(300 if seed % 3 else 9) for _ in range(below(4) + (not requests))]
    starts = [below(30) for _ in lens] + [len(request.tokens) - 1 for request in requests]
    width = 400 if num_reqs is None else 40  # of pages of 16 tokens fewer will do
    pages = [torch.randperm(400, generator=generator)[:width] for _ in starts]
    segments = Segments(
        starts=torch.tensor(starts),
        tables=torch.stack(pages).int(),
        chunk_starts=torch.tensor([0, *lens]).cumsum(0),
        chunk_tokens=torch.randint(100, (sum(lens),), generator=generator),
    )
    return plan_of(requests), segments


def new_buffers(
    num_rows: int, num_segments: int, width: int, num_logits: int, *, has_words: bool
) -> ForwardBatch:
    """Return buffers that are full of what earlier rounds may have left."""

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(1, 99, shape, dtype=dtype)

    token_ids, positions, slots, words = integers(4, num_rows).unbind()
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        qo_indptr=integers(num_segments + 1, dtype=torch.int32),
        kv_lens=integers(num_segments, dtype=torch.int32),
        page_tables=integers(num_segments, width, dtype=torch.int32),
        logit_rows=integers(num_logits),
        max_rows=1,
        words=words if has_words else None,
    )


def moved(values: Any, device: torch.device) -> Any:
    """Return a dataclass with copies of its tensors on a device."""
    fields = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    return dataclasses.replace(
        values,
        **{k: v.to(device).clone() for k, v in fields.items() if isinstance(v, torch.Tensor)},
    )


@pytest.mark.parametrize("padding", [None, (0, 0), (37, 5)])
@pytest.mark.parametrize("seed", range(14))
def test_pack_kernel_matches_the_reference(
    seed: int, padding: tuple[int, int] | None, device: torch.device
) -> None:
    plan, segments = random_plan(seed)
    page_size = 1 if seed % 5 > 2 else 16
    ahead = torch.arange(plan.num_reqs) + 1 if seed % 3 == 1 else None
    if seed % 4 == 1:
        plan = with_fewer_rows(plan)
    check_parity(plan, segments, ahead, page_size, padding, device)


@pytest.mark.parametrize("has_words", [False, True])
@pytest.mark.parametrize("padding", [None, (0, 0), (300, 150)])
@pytest.mark.parametrize("seed", range(4))
def test_pack_kernel_matches_the_reference_without_requests(
    seed: int, padding: tuple[int, int] | None, has_words: bool, device: torch.device
) -> None:
    plan, segments = random_plan(seed, 0)
    assert plan.num_reqs == plan.num_tokens == 0 and segments.num_chunks > 0
    ahead = torch.arange(0) if seed % 2 else None
    check_parity(plan, segments, ahead, 16, padding, device, has_words=has_words)


@pytest.mark.parametrize(("kind", "padding"), [("mask", None), ("chain of fewer rows", (300, 150))])
def test_pack_kernel_matches_the_reference_with_many_requests(
    kind: str, padding: tuple[int, int] | None, device: torch.device
) -> None:
    """Requests, rows and segments of padding are more than the kernel takes at once."""
    is_chain = "chain" in kind
    plan, segments = random_plan(1, 137, is_chain=is_chain)
    assert (plan.kind is PlanKind.CHAIN) == is_chain and segments.num_chunks > 0
    ahead = torch.arange(plan.num_reqs) % 9
    if "fewer" in kind:
        plan = with_fewer_rows(plan)
    check_parity(plan, segments, ahead, 16, padding, device, has_words=not is_chain)


@pytest.mark.parametrize("padding", [(0, 0), (37, 5)])
@pytest.mark.parametrize("seed", range(6))
def test_pack_kernel_matches_the_reference_in_buffers_without_words(
    seed: int, padding: tuple[int, int], device: torch.device
) -> None:
    plan, segments = random_plan(seed, is_chain=True)
    plan = with_fewer_rows(plan) if seed % 2 else plan
    check_parity(plan, segments, None, 4, padding, device, has_words=False)


def with_fewer_rows(plan: VerifyPlan) -> VerifyPlan:
    """Return a plan of which the device uses fewer rows than the host reserved."""
    return dataclasses.replace(plan, num_rows=(plan.num_rows + 1) // 2, row_counts=None)


def check_parity(
    plan: VerifyPlan,
    segments: Segments,
    ahead: torch.Tensor | None,
    page_size: int,
    padding: tuple[int, int] | None,
    device: torch.device,
    *,
    has_words: bool = True,
) -> None:
    """Compare the kernel with the reference; padding is rows and segments, None: no buffers."""
    from nanospec.engine import packing_triton

    options = {"page_size": page_size, "scratch_slot": 999}
    want, want_rows = pack_reference(plan, segments, ahead, **options)
    buffers = None
    if padding is not None:
        sizes = want.num_tokens + padding[0], want.num_reqs + padding[1]
        width = segments.tables.shape[1] + 3
        filled = new_buffers(*sizes, width, plan.num_tokens, has_words=has_words)
        buffers = moved(filled, device)
        fill_buffers(filled, want, 999)
        want = filled
    got, rows = packing_triton.pack(
        helpers.plan_to(plan, device),
        moved(segments, device),
        None if ahead is None else ahead.to(device),
        buffers,
        **options,
    )
    for mine, theirs in ((got, want), (rows, want_rows)):
        for field in dataclasses.fields(theirs):
            one, other = getattr(mine, field.name), getattr(theirs, field.name)
            assert (one is None) == (other is None), field.name
            if isinstance(other, torch.Tensor):
                if field.name == "page_tables":  # what is behind those that are needed is anything
                    one, other = (
                        t[: len(segments.tables), : segments.tables.shape[1]] for t in (one, other)
                    )
                assert one.dtype == other.dtype and one.tolist() == other.tolist(), field.name
