"""A tree without a model: a trie of what followed the current n-gram, in any request so far."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

from nanospec.spec.speculator import Speculator, SpeculatorSetup
from nanospec.types import Draft, PlanKind, Request, Resources, StepOutput

_CONTEXT = 2  # tokens that select a node's children
_BRANCHES = 3  # children of a node at most
_MOST_CONTEXTS = 500_000  # then everything is forgotten, which bounds the memory to some 200 MB


class TrieSpeculator(Speculator):
    """Grows a tree of the most frequent successors, best first by estimated survival."""

    def __init__(self, setup: SpeculatorSetup):
        super().__init__(setup)
        self._successors: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        return Resources(PlanKind.TREE, 1 + self.max_draft_len)

    def observe_step(self, step: StepOutput) -> None:
        """Count which token followed which n-gram, prompts included."""
        if len(self._successors) > _MOST_CONTEXTS:
            self._successors.clear()
        for rows in step.committed:
            tokens = rows.request.tokens
            for end in range(max(rows.start, _CONTEXT - 1), rows.end):
                if end + 1 < len(tokens):
                    self._successors[tuple(tokens[end + 1 - _CONTEXT : end + 1])][
                        tokens[end + 1]
                    ] += 1

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        return [self._grow(request.tokens[-_CONTEXT:], request.max_drafts) for request in requests]

    def _grow(self, context: list[int], count: int) -> Draft | None:
        tokens: list[int] = []
        parents: list[int] = []
        survivals: list[float] = []
        frontier = [(-1.0, 0, 0, context)]  # -survival, order, parent row, its last tokens
        while frontier and len(tokens) < count:
            survival, _, row, last = heapq.heappop(frontier)
            followers = self._successors.get(tuple(last), Counter())
            for token, seen in followers.most_common(_BRANCHES):
                if len(tokens) == count:
                    break
                share = survival * seen / (followers.total() + 1)
                tokens.append(token)
                parents.append(row)
                survivals.append(-share)
                child = [*last, token][-_CONTEXT:]
                heapq.heappush(frontier, (share, len(tokens), len(tokens), child))
        return Draft(tokens, parents, survival=survivals) if tokens else None
