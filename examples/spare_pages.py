"""A policy of one's own: no drafts, and no new requests, while KV pages are short.

Drafts hold pages that a running request may need for its next token. Free pages, and those that are
held for drafts alone, are enough as long as every running request could take two more of them.

    python -m nanospec.generate --speculator examples.spare_pages:SparePagesSpeculator --model ..
"""

from nanospec.spec.ngram import NgramSpeculator
from nanospec.types import Budget, EngineView

PAGES_AHEAD = 2  # of each running request


class SparePagesSpeculator(NgramSpeculator):
    """Drafts by n-grams while pages are plenty."""

    def admit_limit(self, view: EngineView) -> int | None:
        return max(view.num_running, 1) if _is_short(view) else None

    def candidate_budget(self, view: EngineView) -> Budget:
        return Budget(0, 1) if _is_short(view) else super().candidate_budget(view)


def _is_short(view: EngineView) -> bool:
    return view.num_free_pages + view.num_draft_pages < PAGES_AHEAD * view.num_running
