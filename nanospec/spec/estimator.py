"""How probably drafts are accepted, learnt from rounds: for drafters that do not say it themselves.

Logistic regression on what may be known before a draft token is drawn: its depth, how the request's
drafts fared so far, the largest probability of the distribution it is drawn from; and for drafts
that are chosen, not drawn, the share their drafter gives them. A drawn token's own probability is
left out: it would let the token choose whether it is verified.
"""

from collections.abc import Sequence

import numpy as np
import torch

from nanospec.types import Draft, Request, StepOutput, as_list

_DEPTHS = 16  # deeper ones count as this deep
_RATE = 0.3  # of learning, before AdaGrad's division
_FIRST = 1.0  # log-odds of a draft nobody knows anything of


class AcceptanceEstimator:
    """P(a draft is accepted | its parent is), updated with every round's outcomes."""

    def __init__(self) -> None:
        width = _DEPTHS + 3
        self._weights = np.zeros(width)
        self._weights[:_DEPTHS] = _FIRST
        self._squares = np.full(width, 1e-2)
        self._features: dict[Request, np.ndarray] = {}  # [K, F] of each pending draft

    def complete(
        self, requests: Sequence[Request], drafts: Sequence[Draft | None]
    ) -> list[Draft | None]:
        """Return drafts with survivals, falling along each; trees are put in that order."""
        tops = _top_probs(drafts)
        return [
            None if draft is None else self._complete(request, draft, top)
            for request, draft, top in zip(requests, drafts, tops, strict=True)
        ]

    def observe(self, step: StepOutput) -> None:
        """Learn from the verified drafts whose parents were accepted."""
        seen, labels = [], []
        for index, (request, draft, count, path) in enumerate(
            zip(step.requests, step.drafts, step.counts, step.path, strict=True)
        ):
            features = self._features.pop(request, None)
            if draft is None or features is None:
                continue
            depths, deepest = draft.depths, step.deepest(index)
            for row, parent in enumerate(draft.parent_rows[: count - 1], start=1):
                if parent in path and depths[row - 1] <= deepest:
                    seen.append(features[row - 1])
                    labels.append(row in path)
        if seen:
            self._learn(np.array(seen), np.array(labels, dtype=np.float64))
        self._features = {
            request: own for request, own in self._features.items() if not request.is_finished
        }

    def _learn(self, features: np.ndarray, labels: np.ndarray) -> None:
        predicted = _sigmoid(features @ self._weights)
        gradient = features.T @ (predicted - labels) / len(labels)
        self._squares += gradient**2
        self._weights -= _RATE * gradient / np.sqrt(self._squares)

    def _complete(self, request: Request, draft: Draft, top: Sequence[float] | None) -> Draft:
        features = _features(request, draft, top)
        kept = _sigmoid(features @ self._weights)
        survival: list[float] = []
        for row, parent in enumerate(draft.parent_rows):
            above = survival[parent - 1] if parent > 0 else float(parent == 0)
            survival.append(above * float(kept[row]))
        order = list(range(len(draft)))
        if draft.probs is None:  # siblings that were drawn stay in the order of their draws
            order.sort(key=lambda row: -survival[row])  # parents stay before their children
        self._features[request] = features[order]
        return _reordered(draft.but(survival=survival), order)


def _reordered(draft: Draft, order: list[int]) -> Draft:
    """Return the rows of a draft without probs in another order, parents first in it too."""
    assert draft.survival is not None
    survival: list[float] = as_list(draft.survival)
    if draft.parents is None or order == list(range(len(draft))):
        return draft
    place = {0: 0, -1: -1} | {old + 1: new + 1 for new, old in enumerate(order)}
    tokens: list[int] = as_list(draft.tokens)
    return Draft(
        tokens=[tokens[row] for row in order],
        parents=[place[draft.parents[row]] for row in order],
        survival=[survival[row] for row in order],
    )


def _features(request: Request, draft: Draft, top: Sequence[float] | None) -> np.ndarray:
    """Return [K, F]: depth, the request's past, the largest probability, the drafter's share."""
    found = np.zeros((len(draft), _DEPTHS + 3))
    for row, depth in enumerate(draft.depths):
        found[row, min(depth, _DEPTHS) - 1] = 1.0
    found[:, _DEPTHS] = _log_odds(_past_rate(request))
    if top is not None:
        found[:, _DEPTHS + 1] = [_log_odds(each) for each in top]
    if draft.probs is None and draft.survival is not None:
        survival: list[float] = as_list(draft.survival)
        for row, parent in enumerate(draft.parent_rows):
            above = survival[parent - 1] if parent > 0 else 1.0
            found[row, _DEPTHS + 2] = _log_odds(survival[row] / max(above, 1e-9))
    return found


def _past_rate(request: Request) -> float:
    """Return the share of a request's drafts that were accepted, of those that could be."""
    stats = request.stats
    tried = sum(stats.offered[:1]) + sum(
        min(*pair) for pair in zip(stats.kept, stats.offered[1:], strict=False)
    )
    return (sum(stats.kept) + 2.0) / (tried + 3.0)


def _top_probs(drafts: Sequence[Draft | None]) -> list[list[float] | None]:
    """Return the largest probability of each row's q, where it has one. Synchronises once."""
    sampled = [draft.probs for draft in drafts if draft is not None and draft.probs is not None]
    if not sampled:
        return [None] * len(drafts)
    values = iter(torch.cat([probs.amax(-1) for probs in sampled]).tolist())
    return [
        None
        if draft is None or draft.probs is None
        else [next(values) for _ in range(len(draft.probs))]
        for draft in drafts
    ]


def _log_odds(p: float) -> float:
    p = min(max(p, 1e-3), 1 - 1e-3)
    return float(np.log(p / (1 - p)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    odds: np.ndarray = 1 / (1 + np.exp(-x))
    return odds
