"""Admission, chunks, budget and preemption, without a model."""

import pytest

from nanospec import SamplingParams
from nanospec.engine.pages import PageAllocator
from nanospec.engine.scheduler import Scheduler
from nanospec.types import Budget, Draft, Request, Segment
from tests import helpers


def scheduler(
    num_pages: int = 100, *, page_size: int = 4, max_num_seqs: int = 8, budget: int = 16
) -> tuple[Scheduler, PageAllocator]:
    pages = PageAllocator(num_pages, page_size)
    return Scheduler(pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget), pages


def run(segments: list[Segment]) -> None:
    """Pretend that a forward ran: rows are cached, samplers get token 7."""
    for segment in segments:
        samples = segment.samples
        segment.request.kv_len += segment.num_rows
        if samples:
            segment.request.tokens.append(7)


def sizes(segments: list[Segment]) -> list[tuple[int, int]]:
    return [(segment.request.request_id, segment.num_rows) for segment in segments]


def add(to: Scheduler, *lengths: int) -> list[Request]:
    requests = []
    for index, length in enumerate(lengths):
        tokens = [100 * index + position for position in range(length)]
        requests.append(helpers.make_request(tokens, request_id=index))
        to.add(requests[-1])
    return requests


def test_long_prompts_are_cut_and_decode_rows_come_first() -> None:
    own, _ = scheduler(budget=16)
    add(own, 4, 30, 5)
    assert sizes(own.schedule()) == [(0, 4), (1, 12)]
    run([Segment(own.running[0], 4), Segment(own.running[1], 12)])
    assert sizes(own.schedule()) == [(0, 1), (1, 15)]
    run([Segment(own.running[0], 1), Segment(own.running[1], 15)])
    assert sizes(own.schedule()) == [(0, 1), (1, 3), (2, 5)]


@pytest.mark.parametrize(
    ("budget", "num_drafts", "prompt_rows"), [(40, 8, 18), (24, 8, 14), (14, 8, 10), (11, 8, 9)]
)
def test_prompts_leave_drafts_their_rows_but_for_a_few(
    monkeypatch: pytest.MonkeyPatch, budget: int, num_drafts: int, prompt_rows: int
) -> None:
    monkeypatch.setattr("nanospec.engine.scheduler.PROMPT_ROWS", 10)
    own, _ = scheduler(budget=budget)
    for request in add(own, 1, 1, 18)[:2]:
        own.waiting.remove(request)
        own.running.append(request)
        request.pages, request.max_drafts = own.pages.allocate(2), num_drafts // 2
        request.draft = Draft(list(range(num_drafts // 2)))
    assert sizes(own.schedule()) == [(0, 1), (1, 1), (2, prompt_rows)]


def test_a_segment_samples_only_where_its_last_row_is_the_root() -> None:
    request = helpers.make_request(range(5))
    assert not Segment(request, 4).samples
    assert Segment(request, 5).samples


def test_admission_is_first_come_and_waits_for_pages_of_the_whole_prompt() -> None:
    own, pages = scheduler(num_pages=5)
    add(own, 12, 12, 1)
    assert sizes(own.schedule()) == [
        (0, 12)
    ]  # 3 pages; the second needs 3, the third waits its turn
    assert pages.num_free == 2


def test_no_more_requests_run_than_allowed() -> None:
    own, _ = scheduler(max_num_seqs=2)
    add(own, 1, 1, 1)
    assert len(own.schedule()) == 2


def test_the_last_admitted_is_preempted_and_starts_over_at_the_head_of_the_queue() -> None:
    own, pages = scheduler(num_pages=4)
    first, second, third = add(own, 8, 8, 1)
    run(own.schedule())
    assert pages.num_free == 0
    segments = own.schedule()  # the first needs a third page
    assert sizes(segments) == [(0, 1)]
    assert list(own.waiting) == [second, third]
    assert (list(second.pages), second.kv_len, own.num_preemptions) == ([], 0, 1)
    assert len(second.tokens) == 9  # its output is kept
    own.finish(first, "stop")
    run(own.schedule())
    assert second in own.running and second.kv_len == 9


def test_a_request_may_have_to_preempt_itself() -> None:
    own, _ = scheduler(num_pages=4)
    first, second = add(own, 7, 8)
    run(own.schedule())
    assert sizes(own.schedule()) == [(0, 1)]
    assert list(own.waiting) == [second] and own.running == [first]


def test_a_cached_prefix_is_not_scheduled_again() -> None:
    own, pages = scheduler(page_size=4)
    (first,) = add(own, 9)
    run(own.schedule())
    node = pages.publish(first.pages[0], 0, first.tokens[:4])
    pages.publish(first.pages[1], node, first.tokens[4:8])
    second = helpers.make_request(first.tokens[:9], request_id=1)
    own.add(second)
    assert sizes(own.schedule()) == [(0, 1), (1, 1)]
    assert second.pages[:2] == first.pages[:2]
    assert (second.kv_len, second.num_published) == (8, 2)


def test_finishing_frees_pages_whether_waiting_or_running() -> None:
    own, pages = scheduler(max_num_seqs=1)
    running, waiting = add(own, 5, 5)
    own.schedule()
    own.finish(waiting, "abort")
    own.finish(running, "stop")
    assert not own.has_work and pages.num_free == pages.num_pages
    assert (running.finish_reason, waiting.finish_reason) == ("stop", "abort")


# Other engines: vllm PR 16370 (drafts fell off the last page when few slots were left in it).
@pytest.mark.parametrize("max_draft_len", range(1, 9))
def test_pages_cover_the_tokens_and_all_drafts(max_draft_len: int) -> None:
    for length in range(1, 34):
        own, pages = scheduler(page_size=16, budget=64)
        (request,) = add(own, length)
        run(own.schedule())
        drafting = own.reserve_drafts([request], Budget(99, 1 + max_draft_len))
        assert drafting == [request] and request.max_drafts == max_draft_len
        slots = len(request.pages) * 16
        assert len(request.tokens) + max_draft_len <= slots
        assert slots - 16 < len(request.tokens) + max_draft_len
        assert pages.num_free == 100 - len(request.pages)


def test_drafts_take_free_pages_and_give_them_back_to_who_waits() -> None:
    own, pages = scheduler(num_pages=6, page_size=4)
    first, second = add(own, 4, 4)
    run(own.schedule())
    own.reserve_drafts([first, second], Budget(99, 8))
    assert (first.max_drafts, second.max_drafts, pages.num_free) == (7, 7, 0)
    assert own.view().num_draft_pages == 2
    own.add(helpers.make_request([7, 7], request_id=2))
    segments = own.schedule()
    assert [segment.request.request_id for segment in segments] == [0, 1, 2]
    assert own.num_preemptions == 0
    assert (len(first.pages), len(second.pages)) == (2, 2)


def test_roots_get_their_pages_before_any_draft() -> None:
    own, pages = scheduler(num_pages=4, page_size=4)
    first, second = add(own, 4, 4)
    run(own.schedule())
    own.reserve_drafts([first, second], Budget(99, 8))
    assert (first.max_drafts, second.max_drafts, pages.num_free) == (3, 3, 0)
    first.draft = second.draft = Draft([7, 7, 7])
    own.schedule()
    assert (first.num_planned, second.num_planned, own.num_preemptions) == (3, 3, 0)


def test_a_budget_is_dealt_out_evenly_to_those_who_can_use_it() -> None:
    own, _ = scheduler(budget=64)
    requests = add(own, 3, 3, 3, 3)
    requests[1].params = SamplingParams(speculate=False)
    requests[2].max_len = 6  # one draft and one more token
    run(own.schedule())
    own.reserve_drafts(requests, Budget(6, 1 + 5))
    assert [request.max_drafts for request in requests] == [3, 0, 1, 2]
    own.reserve_drafts(requests, Budget(99, 1 + 5))
    assert [request.max_drafts for request in requests] == [5, 0, 1, 5]
    assert len(requests[0].pages) == 3
    own.reserve_drafts(requests, Budget(0, 1))
    assert len(requests[0].pages) == 1  # those for drafts go back


@pytest.mark.parametrize(
    ("most", "drafting"),
    [(0, []), (1, [0]), (2, [0, 2]), (3, [0, 1, 3]), (5, [0, 1, 2, 3, 4]), (9, None)],
)
def test_a_budget_for_some_requests_goes_to_those_far_apart(
    most: int, drafting: list[int] | None
) -> None:
    own, _ = scheduler(budget=64)
    requests = add(own, 3, 3, 3, 3, 3)
    run(own.schedule())
    found = own.reserve_drafts(requests, Budget(99, 1 + 2, max_requests=most))
    want = requests if drafting is None else [requests[index] for index in drafting]
    assert found == want
    assert [request.max_drafts for request in requests] == [2 * (r in want) for r in requests]


# Found in review: a probe's places went to requests that may not draft, and it never ended.
def test_a_budget_for_some_requests_goes_to_those_who_can_use_it() -> None:
    own, _ = scheduler(budget=64)
    requests = add(own, 3, 3, 3, 3)
    requests[0].params = requests[2].params = SamplingParams(speculate=False)
    run(own.schedule())
    assert own.reserve_drafts(requests, Budget(99, 3, max_requests=1)) == [requests[1]]
    assert own.reserve_drafts(requests, Budget(99, 3, max_requests=2)) == [requests[1], requests[3]]
