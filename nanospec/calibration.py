"""Whether drafts survive as often as it was predicted: counted round by round, by depth.

Knows what a round reports, and nothing of where survivals come from.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from nanospec.types import StepOutput, as_list

NUM_BINS = 20  # of equal width, over survivals from 0 to 1


class Calibration:
    """Observes rounds; counts predicted survival against what was accepted.

    Invariant: every draft row that was verified and has a survival is counted once, in the bin of
    its survival at its depth; but, as in `Stats`, no row behind a stop. What is guessed after the
    end of a text is nothing drafters learn, and its fate says nothing about their predictions.
    """

    def __init__(self) -> None:
        # By depth [NUM_BINS, 3]: rows, the sum of their survivals, how many were accepted.
        self._sums: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros((NUM_BINS, 3)))

    def __call__(self, step: StepOutput) -> None:
        """Count a round. Synchronises if survivals are on a GPU."""
        for index, (draft, count, path) in enumerate(
            zip(step.drafts, step.counts, step.path, strict=True)
        ):
            if draft is None or draft.survival is None:
                continue
            survival: list[float] = as_list(draft.survival)
            deepest = step.deepest(index)
            for row, depth, alive in zip(range(1, count), draft.depths, survival, strict=False):
                if depth <= deepest:
                    index = min(int(alive * NUM_BINS), NUM_BINS - 1)
                    self._sums[depth][index] += (1, alive, row in path)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of all rows and, under `depths`, those of each depth, for JSON.

        Each has `count`, `mean_predicted`, `mean_observed`, `calibration_error` and `bins`, of
        which those that hold any rows are listed, with the first three again. The error of all
        rows compares bins of all depths together, so it is at most the depths' mean.
        """
        depths = sorted(self._sums.items())
        every = sum((own for _, own in depths), np.zeros((NUM_BINS, 3)))
        return _figures(every) | {"depths": [{"depth": at} | _figures(own) for at, own in depths]}


def _figures(sums: np.ndarray) -> dict[str, Any]:
    """Return the figures of bins [NUM_BINS, 3], the expected calibration error among them.

    ECE = sum over bins of |B| / n * |observed(B) - predicted(B)|, each of the two a mean over B; it
    is computed from sums, so |B| cancels.

    Source: Guo et al., On Calibration of Modern Neural Networks, arXiv:1706.04599, equation 3.
    """
    gaps = np.abs(sums[:, 2] - sums[:, 1]).sum()
    error = {"calibration_error": float(gaps / max(sums[:, 0].sum(), 1.0))}
    return _means(sums.sum(axis=0)) | error | {"bins": [_means(own) for own in sums if own[0] > 0]}


def _means(sums: np.ndarray) -> dict[str, Any]:
    """Return count and means of sums [3]; without any rows the means are 0."""
    count, predicted, accepted = sums.tolist()
    return {
        "count": int(count),
        "mean_predicted": predicted / max(count, 1),
        "mean_observed": accepted / max(count, 1),
    }
