"""Rows that look ahead over a gap: a mask plan, which no tree can express.

Behind a short draft the plan carries guesses for places further on. Each stands at its own distance
from the root and sees the context and the root alone, not what will stand between: a row at
distance 3 has no row at distances 1 and 2 above it, so it has no place in a tree, and it is never
accepted. What the target says follows it is remembered as a pair of tokens, and later drafts are
made of such pairs. After Lookahead decoding (Fu et al., arXiv:2402.02057), much reduced.

    python -m nanospec.generate --speculator examples.lookahead:LookaheadSpeculator --model MODEL ..
"""

from collections.abc import Sequence
from itertools import pairwise

from nanospec.spec.speculator import Speculator, SpeculatorSetup
from nanospec.types import Draft, PlanKind, Request, Resources, StepOutput

NOBODY = -1  # parent of a row that is only computed


class LookaheadSpeculator(Speculator):
    """Drafts from pairs of tokens that the target has shown, and looks ahead for more of them."""

    def __init__(self, setup: SpeculatorSetup):
        super().__init__(setup)
        self._after: dict[int, int] = {}  # token: what the target last put behind it

    def resources(self) -> Resources:
        return Resources(PlanKind.MASK, 1 + self.max_draft_len)

    def observe_step(self, step: StepOutput) -> None:
        for rows in step.committed:
            tokens = rows.request.tokens[rows.start : rows.end + 1]
            self._after |= dict(pairwise(tokens))
        assert step.logits is not None, "it does not run ahead"
        follows = step.logits.argmax(dim=-1).tolist()
        for token, follower in zip(step.rows.token_ids.tolist(), follows, strict=True):
            self._after.setdefault(token, follower)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        return [self._draft(request.tokens[-1], request.max_drafts) for request in requests]

    def _draft(self, root: int, count: int) -> Draft | None:
        chain = self._chain(root, (count + 1) // 2)
        guesses = list(self._after)[-(count - len(chain)) :] if count > len(chain) else []
        if not chain and not guesses:
            return None
        size, drafted = 1 + len(chain) + len(guesses), len(chain)
        sees = [[column <= row for column in range(size)] for row in range(1 + drafted)]
        sees += [[column in (0, row) for column in range(size)] for row in range(1 + drafted, size)]
        return Draft(
            tokens=chain + guesses,
            parents=[*range(drafted), *[NOBODY] * len(guesses)],
            positions=[*range(1, 1 + drafted), *range(drafted + 2, drafted + 2 + len(guesses))],
            visibility=sees,
        )

    def _chain(self, token: int, length: int) -> list[int]:
        chain: list[int] = []
        while len(chain) < length and token in self._after:
            token = self._after[token]
            chain.append(token)
        return chain
