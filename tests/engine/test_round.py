"""What a round commits: ids, text, counters and pages end at the same token."""

from collections.abc import Sequence

import pytest

from nanospec import SamplingParams
from nanospec.engine.pages import PageAllocator
from nanospec.text import TextStream, Tokenizer
from nanospec.types import Request
from tests import helpers


def play(request: Request, script: Sequence[int], page_size: int = 4) -> PageAllocator:
    """Run a request against a scripted target until it ends."""
    ctx = helpers.make_context(helpers.ScriptedRunner(script), page_size=page_size)
    ctx.scheduler.add(request)
    helpers.run_to_end(ctx)
    return ctx.scheduler.pages


def greedy_request(prompt: Sequence[int], max_tokens: int = 5, **values: object) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    options = {"max_len": len(prompt) + max_tokens, "params": params} | values
    request: Request = helpers.make_request(prompt, **options)
    return request


# Other engines: sglang 31599 (length was looked at before the stop).
def test_a_stop_at_the_last_possible_place_is_a_stop() -> None:
    request = greedy_request([5], max_tokens=3, stop_token_ids=frozenset({99}))
    play(request, [5, 10, 11, 99, 20, 21])
    assert request.output_token_ids == [10, 11, 99]
    assert request.finish_reason == "stop"


# Other engines: lattice PR 245 (max_tokens=1 gave 4).
def test_max_tokens_of_one_gives_one() -> None:
    request = greedy_request([5, 6], max_tokens=1)
    play(request, range(100))
    assert (request.output_token_ids, request.finish_reason) == ([2], "length")


def test_counters_agree_with_the_output() -> None:
    request = greedy_request([5, 6, 7], max_tokens=6)
    play(request, range(100, 200))
    stats = request.stats
    assert stats.tokens == len(request.output_token_ids) == 6
    assert (stats.rounds, stats.emitted, stats.acceptance_length) == (5, 5, 1.0)
    assert stats.drafted == stats.verified == stats.accepted == 0


# Other engines: vllm PR 47616 (text was cut, token ids were not).
def test_a_stop_string_ends_text_and_token_ids_at_the_same_token() -> None:
    tokenizer = Tokenizer(helpers.make_tokenizer(), {}, None)
    reply = tokenizer.encode("the owl said so: 12")
    request = greedy_request([5], max_tokens=40, text=TextStream(tokenizer, [5], ("said", "never")))
    play(request, [5, *reply, *reply])
    request.text.finish()
    assert request.text.text == "the owl "
    decoded = tokenizer.decode(request.output_token_ids)
    assert decoded.startswith("the owl said") and "so" not in decoded
    assert request.finish_reason == "stop" and request.stats.tokens == request.num_output


def test_the_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    tokenizer = Tokenizer(helpers.make_tokenizer(), {}, None)
    reply = tokenizer.encode("a b c")
    request = greedy_request(
        [5], text=TextStream(tokenizer, [5]), stop_token_ids=frozenset(reply[2:3])
    )
    play(request, [5, *reply])
    assert request.output_token_ids == reply[:3]
    assert request.text.text == tokenizer.decode(reply[:2])


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_only_pages_full_of_committed_rows_are_published(page_size: int) -> None:
    script = list(range(5, 60))
    request = greedy_request(script[:7], max_tokens=20)
    pages = play(request, script, page_size)
    # The last token was committed but never run, so it is in no page.
    full = (len(request.tokens) - 1) // page_size
    assert len(pages.match([*request.tokens, 0, 0])[0]) == full
