"""Which requests run in the next forward, and with how many rows each."""

from collections import deque
from collections.abc import Iterator

from nanospec.engine.pages import PageAllocator
from nanospec.types import FinishReason, Request, Segment


class Scheduler:
    """First come, first served, within free pages and a budget of rows per forward.

    A request is admitted when pages for all its known tokens are free, so only growth by new tokens
    can run out of pages; then the request admitted last is preempted: its pages go back, and it
    starts over (its prompt and output recomputed, as far as the prefix cache has lost them) at the
    head of the queue.

    Invariant: waiting requests hold no pages; `running` is in the order of admission.
    """

    def __init__(self, pages: PageAllocator, *, max_num_seqs: int, max_num_batched_tokens: int):
        self._pages = pages
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
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

    def schedule(self) -> list[Segment]:
        """Choose the segments of the next forward; their pages are held when this returns.

        Rows of requests that already generate come first: a long prompt must not stall them.
        """
        preemptions = self.num_preemptions
        segments = [Segment(request, 1) for request in self._grow()]
        budget = self._max_num_batched_tokens - len(segments)
        for request in self.running:
            if _num_pending(request) > 1 and budget > 0:
                segments.append(Segment(request, min(_num_pending(request), budget)))
                budget -= segments[-1].num_rows
        if self.num_preemptions > preemptions:
            return segments  # admitting now would only take pages that are short
        while budget > 0 and self._can_admit():
            request = self._admit()
            segments.append(Segment(request, min(_num_pending(request), budget)))
            budget -= segments[-1].num_rows
        return segments

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a running or waiting request and give its pages back."""
        request.finish_reason = reason
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)

    def _grow(self) -> Iterator[Request]:
        """Yield the requests with one pending token, once a slot for it is held.

        Whoever is preempted to make room was admitted later, so it has not been yielded.
        """
        for request in list(self.running):
            if request not in self.running or _num_pending(request) > 1:
                continue
            needed = self._pages.pages_for(len(request.tokens)) - len(request.pages)
            while needed > self._pages.num_free and request in self.running:
                self._preempt(self.running[-1])
            if request in self.running:
                request.pages += self._pages.allocate(needed)
                yield request

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return False
        tokens = self.waiting[0].tokens
        hit, _ = self._pages.match(tokens)
        needed = self._pages.pages_for(len(tokens)) - len(hit)
        return needed <= self._pages.num_free_without(hit)

    def _admit(self) -> Request:
        """Start the first waiting request, after its longest cached prefix."""
        request = self.waiting.popleft()
        hit, node = self._pages.match(request.tokens)
        self._pages.hold(hit)
        needed = self._pages.pages_for(len(request.tokens)) - len(hit)
        request.pages = hit + self._pages.allocate(needed)
        request.kv_len = len(hit) * self._pages.page_size
        request.num_published = len(hit)
        request.prefix_node = node
        self.running.append(request)
        return request

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self._pages.release(request.pages)
        request.pages = []
        request.kv_len = 0
        request.num_published = 0
        request.prefix_node = 0


def _num_pending(request: Request) -> int:
    """Return how many known tokens have no keys and values yet."""
    return len(request.tokens) - request.kv_len
