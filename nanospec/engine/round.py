"""One round: pack, run, sample, commit. Start reading here.

Host synchronisations per round: one, where the sampled tokens are read.
"""

from collections.abc import Sequence

import torch

from nanospec.cudagraph.runner import ModelRunner
from nanospec.engine.packing import pack
from nanospec.engine.pages import PageAllocator
from nanospec.spec.sampler import sample, sampling_rows
from nanospec.types import FinishReason, Request, Segment


def run_round(
    segments: Sequence[Segment], runner: ModelRunner, pages: PageAllocator, device: torch.device
) -> list[tuple[Request, FinishReason | None]]:
    """Advance every segment's request; synchronises once.

    Returns:
        The requests that got a token, in the order of the segments, and why they end, if they do.
    """
    batch = pack(segments, pages.page_size, device)
    output = runner.run(batch)
    sampled = [segment.request for segment in segments if segment.samples]
    if sampled:
        rows = sampling_rows([(r, r.num_output) for r in sampled], output.logits.shape[1], device)
        tokens = sample(output.logits, rows).tolist()
    else:
        tokens = []
    # A request's first token ends its prompt's last chunk; the rounds that follow are counted.
    is_round = [request.num_output > 0 for request in sampled]
    for segment in segments:
        _commit_rows(segment, pages)
    return [
        (request, _commit_token(request, token, is_round=counts))
        for request, token, counts in zip(sampled, tokens, is_round, strict=True)
    ]


def _commit_rows(segment: Segment, pages: PageAllocator) -> None:
    """Count the rows' keys and values as present, and publish the pages they fill."""
    request = segment.request
    request.kv_len += segment.num_rows
    size = pages.page_size
    while (request.num_published + 1) * size <= request.kv_len:
        index = request.num_published
        tokens = request.tokens[index * size : (index + 1) * size]
        request.prefix_node = pages.publish(request.pages[index], request.prefix_node, tokens)
        request.num_published += 1


def _commit_token(request: Request, token: int, *, is_round: bool) -> FinishReason | None:
    """Append a token: ids, text and counters end at the same one. Return why it is the last.

    A stop is looked for before the length, so that a stop at the last possible place is a stop.
    """
    request.tokens.append(token)
    request.stats.tokens += 1
    if is_round:
        request.stats.rounds += 1
        request.stats.emitted += 1
    if token in request.stop_token_ids:
        return "stop"
    if request.text.push(token, may_stop=request.num_output > request.params.min_tokens):
        return "stop"
    return "length" if len(request.tokens) >= request.max_len else None
