"""From logits to probabilities and tokens, row by row. The only place that does either.

`probabilities_reference` and `draw_reference` are the specification, `sampler_triton` the same in a
few passes over the vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanospec.device import to_device_together
from nanospec.params import GREEDY_TEMPERATURE, SamplingRows
from nanospec.spec import noise
from nanospec.types import Request


def sampling_rows(
    requests: Sequence[Request],
    vocab_size: int,
    device: torch.device,
    ahead: Tensor | None = None,
) -> SamplingRows:
    """Return how the next token of each request is sampled.

    Args:
        requests: N.
        vocab_size: V.
        device: where the logits are.
        ahead: [N] int64, tokens of each that the host does not know yet.
    """
    params = [request.params for request in requests]
    known = [request.num_output for request in requests]
    least = [p.min_tokens for p in params]
    limited = [r for r, count, own in zip(requests, known, least, strict=True) if count < own]
    stops = sorted({token for request in limited for token in request.stop_token_ids})
    is_stop = [[token in r.stop_token_ids for token in stops] for r in requests if stops]
    temperatures, top_ps = [p.temperature for p in params], [p.top_p for p in params]
    counts = [vocab_size if p.top_k <= 0 else min(p.top_k, vocab_size) for p in params]
    temperature, top_p, min_p, top_k, seed, position, min_position, stop, own = to_device_together(
        [
            (temperatures, torch.float32),
            (top_ps, torch.float32),
            ([p.min_p for p in params], torch.float32),
            (counts, torch.int64),
            ([request.seed for request in requests], torch.int64),
            (known, torch.int64),
            (least, torch.int64),
            (stops, torch.int64),
            (is_stop, torch.bool),
        ],
        device,
    )
    return SamplingRows(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=position if ahead is None else position + ahead,
        min_position=min_position,
        stops=stop,
        is_stop=own.view(len(requests), len(stops)),
        is_greedy=max(temperatures, default=0.0) < GREEDY_TEMPERATURE,
        has_filters=min(top_ps, default=1.0) < 1 or min(counts, default=vocab_size) < vocab_size,
    )


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draw a token for each row: [N] int64 from logits [N, V].

    The draw is the argmax of log p plus Gumbel noise, so it depends only on the row's own
    probabilities, seed and output position.
    """
    if rows.is_greedy:
        return _largest(logits, rows)
    return draw(probabilities(logits, rows), rows, noise.TARGET)


def sample_at(logits: Tensor, rows: SamplingRows, index: Tensor, ahead: Tensor) -> Tensor:
    """Draw by `rows.at(index, ahead)`, which need not be gathered where logits alone decide.

    Args:
        logits: [N, V].
        rows: R of them.
        index: [N] int64, below R.
        ahead: [N] int64.
    """
    return first_largest(logits) if rows.is_argmax else sample(logits, rows.at(index, ahead))


def first_largest(logits: Tensor) -> Tensor:
    """Return the token of the largest logit, the first one among equals, [N] int64 of [N, V]."""
    return logits.max(dim=-1).indices  # on a GPU a quarter less time than argmax, which is the same


def draw(probs: Tensor, rows: SamplingRows, stream: int) -> Tensor:
    """Draw [N] int64 from probabilities [N, V] fp32, which need not sum to 1, by a stream of noise.

    Where all are 0 it is the first token.
    """
    if probs.is_cuda and len(probs) > 0:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.spec import sampler_triton

        return sampler_triton.draw(probs, rows, stream)
    return draw_reference(probs, rows, stream)


def draw_reference(probs: Tensor, rows: SamplingRows, stream: int) -> Tensor:
    """See `draw`."""
    gumbel = noise.gumbel(rows.seed, rows.position, stream, probs.shape[-1])
    return (probs.log() + gumbel).argmax(dim=-1)


def draw_drafts(
    logits: Tensor, roots: SamplingRows, depth: int, shares_noise: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Draw the draft tokens of one depth from a drafter's logits.

    Rows that share noise draw as the target will at that output position, the others by noise of
    their own.

    Args:
        logits: [N, V].
        roots: how the token after each root is sampled.
        depth: how many drafts are between the root and this token.
        shares_noise: [N] bool.

    Returns:
        Tokens [N] int64, and the q they were drawn from, [N, V] fp32; None if all are greedy.
    """
    everyone = torch.arange(len(logits), device=logits.device)
    ahead = torch.full_like(everyone, depth)
    if roots.is_greedy:
        return sample_at(logits, roots, everyone, ahead), None
    rows = roots.at(everyone, ahead)
    q = probabilities(logits, rows)
    alike = draw(q, rows, noise.TARGET)
    return torch.where(shares_noise, alike, draw(q, roots, noise.DRAFT + depth)), q


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the distribution each row is drawn from, [N, V] fp32, after all filters.

    A greedy row has probability 1 at its largest logit, the first one among equals. A row in which
    every logit is -inf says nothing: all tokens that are not forbidden are equally probable.
    """
    if logits.is_cuda and len(logits) > 0:
        from nanospec.spec import sampler_triton

        if len(rows.stops) > 0:
            logits = _usable(logits, rows)
        return sampler_triton.probabilities(logits, rows)
    return probabilities_reference(logits, rows)


def probabilities_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See `probabilities`."""
    logits = _usable(logits, rows).float()
    below = logits - logits.amax(dim=-1, keepdim=True)  # dividing by 1e-5 must not overflow
    probs = (below / rows.temperature.clamp(min=GREEDY_TEMPERATURE)[:, None]).softmax(dim=-1)
    probs = probs.masked_fill(probs < rows.min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)
    if rows.has_filters:
        probs = _keep_top(probs, logits, rows)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter_(1, below.argmax(-1, keepdim=True), 1.0)
    return torch.where((rows.temperature < GREEDY_TEMPERATURE)[:, None], one_hot, probs)


def _largest(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the largest of `_usable` [N, V], the first one among equals, in one pass over it."""
    if rows.is_argmax:
        return first_largest(logits)
    most, best = _without_stops(logits, rows).max(dim=-1)
    # Where every logit is -inf it is the first token that is not forbidden: one of the first U + 1.
    first = torch.arange(len(rows.stops) + 1, device=logits.device)
    is_limited = (rows.position < rows.min_position)[:, None, None]
    is_forbidden = (rows.stops == first[:, None]) & rows.is_stop[:, None, :] & is_limited
    allowed = (~is_forbidden.any(dim=-1)).long().argmax(dim=-1)
    return torch.where(most == -torch.inf, allowed, best)


def _usable(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Forbid stop tokens where they may not come yet, and let a row without any choice be even."""
    allowed = _without_stops(logits, rows)
    is_dead = allowed.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.where(is_dead, _without_stops(torch.zeros_like(logits), rows), allowed)


def _without_stops(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Forbid the stop tokens of rows that are not yet allowed to stop."""
    if len(rows.stops) == 0:
        return logits
    forbidden = rows.is_stop & (rows.position < rows.min_position)[:, None]
    columns = logits[:, rows.stops].masked_fill(forbidden, -torch.inf)
    return logits.index_copy(1, rows.stops, columns)


def _keep_top(probs: Tensor, logits: Tensor, rows: SamplingRows) -> Tensor:
    """Zero what top-k and then top-p leave out; tokens of equal logits are ranked by id."""
    # By logits, which may differ where probabilities are rounded to the same number.
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(1, order)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ranked = ranked.masked_fill(rank >= rows.top_k[:, None], 0.0)
    mass = ranked.cumsum(dim=-1)
    # A token is kept while what ranks above it has not reached top_p of all the mass left.
    reached = mass - ranked >= rows.top_p[:, None] * mass[:, -1:]
    ranked = ranked.masked_fill(reached & (rank > 0) & (rows.top_p < 1)[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ranked)
