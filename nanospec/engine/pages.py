"""Who holds which KV page, and which pages hold a known prefix. Knows no tensors."""

from collections import OrderedDict
from collections.abc import Sequence

from nanospec.errors import OutOfPagesError

_ROOT_NODE = 0


class PageAllocator:
    """Hands out pages and finds prefixes that are still cached.

    A full page whose tokens are committed can be *published*. It becomes a node of a chain: its key
    is its parent node and its own tokens. Node numbers are never used twice, and a dictionary
    compares the whole key, so a hit is always the same tokens after the same prefix.

    Invariant: a page is either free or held by at least one request; `_free` is in the order of
    reuse (pages without content first, then the least recently released).
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._holders = [0] * num_pages
        self._page_of: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key: page, node
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # page: key
        self._next_node = _ROOT_NODE + 1

    @property
    def num_free(self) -> int:
        """Pages nobody holds, cached ones included."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Find the cached pages of a prefix, without taking them.

        The last token is never part of a hit: it has to be run to be followed.

        Returns:
            The pages, and the node of the last one.
        """
        pages: list[int] = []
        node = _ROOT_NODE
        size = self.page_size
        for start in range(0, len(tokens) - size, size):
            found = self._page_of.get((node, tuple(tokens[start : start + size])))
            if found is None:
                break
            page, node = found
            pages.append(page)
        return pages, node

    def num_free_without(self, pages: Sequence[int]) -> int:
        """Return how many pages would be free if these were held."""
        return self.num_free - sum(page in self._free for page in pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Hold pages that `match` found."""
        for page in pages:
            self._free.pop(page, None)
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Take free pages; what they had cached is forgotten.

        Raises:
            OutOfPagesError: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} KV pages of {self.page_size} tokens are needed, {self.num_free} of "
                f"{self.num_pages} are free"
            )
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            self._forget(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back pages, listed in the order of their tokens.

        The last pages of a prefix are reused first: an early page serves more prompts.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released more often than held"
            if self._holders[page] == 0:
                self._free[page] = None
                if page not in self._key_of:
                    self._free.move_to_end(page, last=False)

    def publish(self, page: int, parent: int, tokens: Sequence[int]) -> int:
        """Make a full page of committed tokens findable.

        Args:
            page: held by the caller.
            parent: node of the page before it, 0 for the first.
            tokens: the page's own, `page_size` of them.

        Returns:
            The page's node. Where the same prefix is already cached in another page, that page
            stays the cached one and its node is returned.
        """
        assert len(tokens) == self.page_size, "only full pages are published"
        if not self._prefix_caching:
            return _ROOT_NODE
        key = (parent, tuple(tokens))
        if key not in self._page_of:
            self._page_of[key] = (page, self._next_node)
            self._key_of[page] = key
            self._next_node += 1
        return self._page_of[key][1]

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
