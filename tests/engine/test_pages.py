"""Pages balance, prefixes are found by their tokens, eviction is least recently used."""

import random

import pytest

from nanospec.engine.pages import PageAllocator
from nanospec.errors import OutOfPagesError


def publish(pages: PageAllocator, held: list[int], tokens: list[int]) -> None:
    """Publish all full pages of a prefix."""
    node, size = 0, pages.page_size
    for index in range(len(tokens) // size):
        node = pages.publish(held[index], node, tokens[index * size : (index + 1) * size])


def test_allocating_more_than_is_free_takes_nothing() -> None:
    pages = PageAllocator(3, 4)
    pages.allocate(2)
    with pytest.raises(OutOfPagesError, match="1 of 3"):
        pages.allocate(2)
    assert pages.num_free == 1


def test_a_published_prefix_is_found_but_for_its_last_token() -> None:
    pages = PageAllocator(8, 4)
    tokens = list(range(8))
    held = pages.allocate(2)
    publish(pages, held, tokens)
    assert pages.match(tokens)[0] == held[:1]  # the last token has to be run
    assert pages.match([*tokens, 99])[0] == held
    assert pages.match([0, 1, 2, 99, 4, 5, 6, 7, 8])[0] == []


# Other engines: nano-vllm 163 (append logic off by one when the prompt fills its pages).
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_hits_never_cover_the_whole_prompt(page_size: int) -> None:
    for length in range(1, 4 * page_size + 2):
        pages = PageAllocator(64, page_size)
        tokens = list(range(length))
        publish(pages, pages.allocate(pages.pages_for(length)), tokens)
        hit = len(pages.match(tokens)[0]) * page_size
        assert hit == (length - 1) // page_size * page_size


def test_equal_tokens_after_another_prefix_are_no_hit() -> None:
    pages = PageAllocator(8, 2)
    publish(pages, pages.allocate(2), [1, 2, 3, 4])
    publish(pages, pages.allocate(1), [9, 9])
    assert len(pages.match([1, 2, 3, 4, 5])[0]) == 2
    assert len(pages.match([9, 9, 3, 4, 5])[0]) == 1


def test_a_hit_compares_tokens_never_the_hash_alone() -> None:
    # -1 and -2 have the same hash in CPython, so these keys collide.
    assert hash((0, (-1,))) == hash((0, (-2,)))
    pages = PageAllocator(4, 1)
    publish(pages, pages.allocate(1), [-1])
    assert pages.match([-2, 5])[0] == []


# Other engines: nano-vllm 66 and 163 (stale mapping after a page is used again).
def test_a_reused_page_is_forgotten_under_its_old_tokens() -> None:
    pages = PageAllocator(2, 2)
    held = pages.allocate(2)
    publish(pages, held, [1, 2, 3, 4])
    pages.release(held)
    taken = pages.allocate(2)
    assert pages.match([1, 2, 3, 4, 5])[0] == []
    publish(pages, taken, [7, 8, 9, 9])
    assert pages.match([1, 2, 3, 4, 5])[0] == []
    assert pages.match([7, 8, 9, 9, 5])[0] == taken


def test_a_child_is_unreachable_once_its_parent_is_gone() -> None:
    pages = PageAllocator(2, 1)
    held = pages.allocate(2)
    publish(pages, held, [1, 2])
    pages.release(held)
    pages.hold(held[1:])  # keeps the child while its parent is reused
    parent = pages.allocate(1)
    publish(pages, parent, [1])
    assert pages.match([1, 2, 3])[0] == parent


# Other engines: nano-vllm 219, mini-sglang PR 142 (duplicate pages of one prefix in one step).
def test_the_same_prefix_twice_keeps_the_first_page_and_both_holders_whole() -> None:
    pages = PageAllocator(8, 2)
    first, second = pages.allocate(2), pages.allocate(2)
    publish(pages, first, [1, 2, 3, 4])
    publish(pages, second, [1, 2, 3, 4])
    assert pages.match([1, 2, 3, 4, 5])[0] == first
    pages.release(second)
    assert pages.match([1, 2, 3, 4, 5])[0] == first
    pages.release(first)
    assert pages.num_free == 8
    assert pages.match([1, 2, 3, 4, 5])[0] == first


def test_pages_without_content_go_first_then_the_least_recently_released() -> None:
    pages = PageAllocator(5, 1)
    old, new, plain = pages.allocate(2), pages.allocate(1), pages.allocate(1)
    publish(pages, old, [1, 2])
    publish(pages, new, [3])
    pages.release(old)
    pages.release(new)
    pages.release(plain)
    order = pages.allocate(5)
    assert set(order[:2]) == {*plain, 4}
    assert order[2:] == [old[1], old[0], new[0]]  # the end of a prefix before its start


def test_held_pages_are_never_evicted() -> None:
    pages = PageAllocator(3, 1)
    held = pages.allocate(1)
    publish(pages, held, [1])
    pages.release(held)
    pages.hold(pages.match([1, 2])[0])
    assert held[0] not in pages.allocate(2)


def test_without_prefix_caching_nothing_is_found() -> None:
    pages = PageAllocator(4, 1, prefix_caching=False)
    publish(pages, pages.allocate(2), [1, 2])
    assert pages.match([1, 2, 3])[0] == []


def test_releasing_more_often_than_holding_is_our_bug() -> None:
    pages = PageAllocator(2, 1)
    held = pages.allocate(1)
    pages.release(held)
    with pytest.raises(AssertionError, match="more often"):
        pages.release(held)


@pytest.mark.parametrize("seed", range(5))
def test_random_use_balances_and_never_finds_wrong_tokens(seed: int) -> None:
    rng = random.Random(seed)
    pages, size = PageAllocator(20, 2), 2
    content: dict[int, tuple[int, ...]] = {}  # page: its prefix as really written
    live: list[list[int]] = []
    for _ in range(2000):
        if live and rng.random() < 0.45:
            pages.release(live.pop(rng.randrange(len(live))))
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 10))]
        hit, node = pages.match(tokens)
        for index, page in enumerate(hit):
            assert content[page] == tuple(tokens[: (index + 1) * size])
        needed = pages.pages_for(len(tokens)) - len(hit)
        if needed > pages.num_free_without(hit):
            continue
        pages.hold(hit)
        held = hit + pages.allocate(needed)
        assert len(set(held)) == len(held)
        for index in range(len(hit), len(tokens) // size):
            content[held[index]] = tuple(tokens[: (index + 1) * size])
            own = tokens[index * size : (index + 1) * size]
            node = pages.publish(held[index], node, own)
        live.append(held)
    for held in live:
        pages.release(held)
    assert pages.num_free == 20
