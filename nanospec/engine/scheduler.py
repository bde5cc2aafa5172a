"""Which requests run in the next forward, with how many rows each, and who holds which pages."""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from nanospec.config import PROMPT_ROWS
from nanospec.engine.pages import PageAllocator
from nanospec.errors import ConfigError
from nanospec.spec.budget import deal, spread
from nanospec.types import Budget, EngineView, FinishReason, Request, Segment


def _no_limit(view: EngineView) -> int | None:
    del view
    return None


class Scheduler:
    """First come, first served, within free pages and a budget of rows per forward.

    A request is admitted when pages for all its known tokens are free, so only growth by new tokens
    can run out of pages. Then drafts give theirs up first; if that does not suffice, the request
    admitted last is preempted: its pages go back, and it starts over (its prompt and output
    recomputed, as far as the prefix cache has lost them) at the head of the queue.

    A round may be scheduled while the one before is in flight, its result not read: then every
    request counts with the most tokens it may have, and nobody is preempted (`can_run_ahead`).

    Invariant: waiting requests hold no pages; `running` is in the order of admission.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        admit_limit: Callable[[EngineView], int | None] = _no_limit,
    ):
        self.pages = pages
        self._max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._admit_limit = admit_limit
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def view(self) -> EngineView:
        """Return what a speculator may know."""
        return EngineView(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_pages=self.pages.num_free,
            page_size=self.pages.page_size,
            count_draft_pages=self._count_draft_pages,
        )

    def can_run_ahead(self) -> bool:
        """Whether a round fits behind one in flight: then nothing that is in use is taken back."""
        if len(self.running) <= self.pages.num_free:
            return True  # all rows in flight have pages: one token more takes one page at most
        needed = sum(
            max(self.pages.pages_for(request.most_tokens) - len(request.pages), 0)
            for request in self.running
            if not _is_ending(request)
        )
        return needed <= self.pages.num_free

    def schedule(self) -> list[Segment]:
        """Choose the segments of the next forward; their pages are held when this returns.

        Rows of requests that already generate come first, as a long prompt must not stall them;
        then `PROMPT_ROWS` of prompts, their drafts, and more of prompts. Which drafts get a row is
        not decided here.
        """
        segments = [Segment(request, 1) for request in self._grow()]
        max_running = self._max_running()
        can_admit = bool(self.waiting) and len(self.running) < max_running
        if len(segments) == len(self.running) and not can_admit:
            return segments
        room = self.max_num_batched_tokens - len(segments)
        num_drafts = sum(segment.request.num_planned for segment in segments)
        budget = max(room - num_drafts, min(room, PROMPT_ROWS))
        for request in self.running:
            if _num_pending(request) > 1 and budget > 0:
                segments.append(Segment(request, min(_num_pending(request), budget)))
                budget -= segments[-1].num_rows
        while budget > 0 and len(self.running) < max_running:
            admitted = self._admit()
            if admitted is None:
                break
            segments.append(Segment(admitted, min(_num_pending(admitted), budget)))
            budget -= segments[-1].num_rows
        return segments

    def commit(self, request: Request, num_rows: int) -> None:
        """Count rows as part of a request's cache, and publish the pages they fill."""
        request.kv_len += num_rows
        size = self.pages.page_size
        while (request.num_published + 1) * size <= request.kv_len:
            index = request.num_published
            tokens = request.tokens[index * size : (index + 1) * size]
            page = request.pages[index]
            request.prefix_node = self.pages.publish(page, request.prefix_node, tokens)
            request.num_published += 1

    def reserve_drafts(self, requests: Sequence[Request], budget: Budget) -> list[Request]:
        """Fit each request's pages to its tokens and the drafts it may make next.

        The budget is dealt out evenly; where not all may have some, to requests far apart. Drafts
        take free pages only, after all roots have theirs, or they would be taken back before they
        are verified; pages beyond go back.

        Returns:
            The requests that may make drafts; `max_drafts` says how many.
        """
        going = [r for r in requests if not (r.is_finished or _is_ending(r))]
        tokens = [request.most_tokens for request in going]
        for request, own in zip(going, tokens, strict=True):
            missing = self.pages.pages_for(own) - len(request.pages)
            if 0 < missing <= self.pages.num_free:
                request.pages.extend(self.pages.allocate(missing))
        most = budget.max_rows_per_request - 1
        wanted = [min(_num_useful(r), most) for r in going]
        if budget.max_requests is not None:
            able = [index for index, each in enumerate(wanted) if each > 0]
            chosen = {able[place] for place in spread(len(able), budget.max_requests)}
            wanted = [each if index in chosen else 0 for index, each in enumerate(wanted)]
        shares = deal(wanted, budget.total_drafts)
        for request, own, share in zip(going, tokens, shares, strict=True):
            held = len(request.pages)
            slots = (held + self.pages.num_free) * self.pages.page_size
            request.max_drafts = max(min(share, slots - own), 0)
            needed = self.pages.pages_for(own + request.max_drafts)
            if needed > held and request.max_drafts > 0:
                request.pages.extend(self.pages.allocate(needed - held))
            elif needed < held:
                self._cut_pages(request, needed)
        return [request for request in going if request.max_drafts > 0]

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a running or waiting request: its pages go back, its text is complete."""
        request.finish_reason = reason
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)
        request.text.finish()
        request.stats.seconds = time.perf_counter() - request.arrival

    def _grow(self) -> Iterator[Request]:
        """Yield the requests with one pending token, once a slot for it is held.

        Whoever is preempted to make room was admitted later, so it has not been yielded.
        """
        index = 0
        while index < len(self.running):  # who is preempted goes from the end
            request = self.running[index]
            index += 1
            if _num_pending(request) > 1 or _is_ending(request):
                continue
            needed = self.pages.pages_for(request.most_tokens) - len(request.pages)
            if needed > 0:
                if needed > self.pages.num_free:
                    self._reclaim_draft_pages()
                while needed > self.pages.num_free and index <= len(self.running):
                    self._preempt(self.running[-1])
                if index > len(self.running):
                    return
                request.pages.extend(self.pages.allocate(needed))
            yield request

    def _max_running(self) -> int:
        limit = self._admit_limit(self.view())
        if limit is None:
            return self._max_num_seqs
        if limit < 1:
            raise ConfigError(f"the speculator's admit_limit is {limit}; at least 1 must run")
        return min(limit, self._max_num_seqs)

    def _admit(self) -> Request | None:
        """Start the first waiting request, after its longest cached prefix; None if none fits."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        hit, node = self.pages.match(request.tokens)
        needed = self.pages.pages_for(len(request.tokens)) - len(hit)
        missing = needed - self.pages.num_free_without(hit)
        if missing > 0:
            if missing > self._count_draft_pages():
                return None
            self._reclaim_draft_pages()
        self.waiting.popleft()
        self.pages.hold(hit)
        request.pages = array("i", hit + self.pages.allocate(needed))
        request.kv_len = len(hit) * self.pages.page_size
        request.num_published = len(hit)
        request.prefix_node = node
        self.running.append(request)
        return request

    def _preempt(self, request: Request) -> None:
        assert not request.in_flight, "what is in flight needs its pages"
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.pages = array("i")
        request.kv_len = 0
        request.num_published = 0
        request.prefix_node = 0
        request.draft = None
        request.max_drafts = 0

    def _count_draft_pages(self) -> int:
        return sum(map(self._num_draft_pages, self.running))

    def _num_draft_pages(self, request: Request) -> int:
        """Return how many pages a request holds for draft rows alone."""
        return max(len(request.pages) - self.pages.pages_for(request.most_tokens), 0)

    def _reclaim_draft_pages(self) -> None:
        """Take back the pages that are held for drafts; which tokens these are plays no part."""
        for request in self.running:
            if self._num_draft_pages(request) > 0:
                self._cut_pages(request, self.pages.pages_for(request.most_tokens))
                room = len(request.pages) * self.pages.page_size - request.most_tokens
                request.max_drafts = min(request.max_drafts, room)

    def _cut_pages(self, request: Request, count: int) -> None:
        self.pages.release(request.pages[count:])
        del request.pages[count:]


def _num_pending(request: Request) -> int:
    """Return how many known tokens have no keys and values yet."""
    return len(request.tokens) - request.kv_len


def _is_ending(request: Request) -> bool:
    """Whether a round in flight is the request's last one, whatever it accepts."""
    return bool(request.in_flight) and request.fewest_tokens >= request.max_len


def _num_useful(request: Request) -> int:
    """Return how many drafts a request could still use: one more token than them is emitted."""
    left = request.max_len - request.fewest_tokens - 1
    return max(left, 0) if request.params.speculate else 0
