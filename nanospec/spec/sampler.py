"""From logits to probabilities and tokens, row by row. The only place that does either."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec.spec import noise
from nanospec.types import GREEDY_TEMPERATURE, Request


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of N rows of logits is sampled."""

    temperature: Tensor  # [N] fp32
    top_k: Tensor  # [N] int64, V where off
    top_p: Tensor  # [N] fp32, 1 where off
    min_p: Tensor  # [N] fp32, 0 where off
    seed: Tensor  # [N] int64
    position: Tensor  # [N] int64, output position of the token drawn
    forbidden: Tensor  # [F, 2] int64, (row, token) pairs that cannot be drawn
    is_greedy: bool  # host: all rows are
    has_filters: bool  # host: some row has top-k or top-p


def sampling_rows(
    rows: Sequence[tuple[Request, int]], vocab_size: int, device: torch.device
) -> SamplingRows:
    """Collect the sampling parameters of rows.

    Args:
        rows: N pairs of a request and the output position, from 0, of the row's token.
        vocab_size: V.
        device: where the logits are.
    """
    params = [request.params for request, _ in rows]
    forbidden = [
        (row, token)
        for row, (request, position) in enumerate(rows)
        if position < request.params.min_tokens
        for token in request.stop_token_ids
    ]
    floats = torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params]).view(-1, 3)
    counts = [vocab_size if p.top_k <= 0 else min(p.top_k, vocab_size) for p in params]
    integers = torch.tensor(
        [(k, request.seed, position) for k, (request, position) in zip(counts, rows, strict=True)],
        dtype=torch.int64,
    ).view(-1, 3)
    temperature, top_p, min_p = floats.to(device).unbind(1)
    top_k, seed, position = integers.to(device).unbind(1)
    return SamplingRows(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=position,
        forbidden=torch.tensor(forbidden, dtype=torch.int64).view(-1, 2).to(device),
        is_greedy=all(p.is_greedy for p in params),
        has_filters=any(p.top_p < 1 or k < vocab_size for p, k in zip(params, counts, strict=True)),
    )


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Draw a token for each row: [N] int64 from logits [N, V].

    The draw is the argmax of log p plus Gumbel noise, so it depends only on the row's own
    probabilities, seed and output position.
    """
    if rows.is_greedy:
        return _without_forbidden(logits, rows).argmax(dim=-1)
    probs = probabilities(logits, rows)
    return (probs.log() + noise.gumbel(rows.seed, rows.position, probs.shape[-1])).argmax(dim=-1)


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the distribution each row is drawn from, [N, V] fp32, after all filters.

    A greedy row has probability 1 at its largest logit, the first one among equals.
    """
    logits = _without_forbidden(logits, rows).float()
    logits = logits - logits.amax(dim=-1, keepdim=True)  # dividing by 1e-5 must not overflow
    probs = (logits / rows.temperature.clamp(min=GREEDY_TEMPERATURE)[:, None]).softmax(dim=-1)
    probs = probs.masked_fill(probs < rows.min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)
    if rows.has_filters:
        probs = _keep_top(probs, rows)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where((rows.temperature < GREEDY_TEMPERATURE)[:, None], one_hot, probs)


def _without_forbidden(logits: Tensor, rows: SamplingRows) -> Tensor:
    if len(rows.forbidden) == 0:
        return logits
    return logits.index_put(tuple(rows.forbidden.unbind(1)), logits.new_tensor(-torch.inf))


def _keep_top(probs: Tensor, rows: SamplingRows) -> Tensor:
    """Zero what top-k and then top-p leave out; equal probabilities are ranked by token id."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ranked = ranked.masked_fill(rank >= rows.top_k[:, None], 0.0)
    mass = ranked.cumsum(dim=-1)
    # A token is kept while what ranks above it has not reached top_p of all the mass left.
    reached = mass - ranked >= rows.top_p[:, None] * mass[:, -1:]
    ranked = ranked.masked_fill(reached & (rank > 0) & (rows.top_p < 1)[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(1, order, ranked)
