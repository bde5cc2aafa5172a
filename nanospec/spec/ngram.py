"""Prompt lookup: what followed the last tokens before follows them again. No model, chains."""

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from nanospec.spec.speculator import Speculator
from nanospec.types import Draft, Request

_LONGEST, _SHORTEST = 4, 1  # tokens of a suffix that is looked up


class NgramSpeculator(Speculator):
    """Proposes what followed the latest earlier occurrence of the longest known suffix.

    Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding.
    """

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        return [self._draft(request.tokens, request.max_drafts) for request in requests]

    def _draft(self, tokens: list[int], count: int) -> Draft | None:
        text = np.array(tokens)
        for size in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
            windows = sliding_window_view(text[:-1], size)
            starts = np.flatnonzero((windows == text[-size:]).all(axis=1))
            if len(starts) > 0:
                end = int(starts[-1]) + size
                return Draft(tokens[end : end + count])
        return None
