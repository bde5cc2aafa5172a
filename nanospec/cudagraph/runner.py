"""Running the target on a batch: from packed rows to logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from nanospec.attention.backend import AttentionBackend
from nanospec.attention.batch import LONG_ROWS, ForwardBatch


class Target(Protocol):
    """A decoder, as far as a runner needs to know it."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Return final hidden states [T, H], and the residual stream after each tap."""
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map final hidden states [N, H] to [N, V], in `out` where it is given."""
        ...


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a forward of the target gives."""

    logits: Tensor  # [N, V], of the batch's logit rows; perhaps overwritten by the next forward
    tier: int  # rows that were run, padding included


class ModelRunner(Protocol):
    """Runs a batch through the target."""

    def buffers(self, num_rows: int, num_logits: int, max_rows: int) -> ForwardBatch | None:
        """Return a batch of at least so many rows to be filled and run; None: make a new one.

        All of it is to be filled, but of page tables only what segments need. It is valid until the
        next call.

        Args:
            num_rows: T.
            num_logits: N, rows whose logits are wanted.
            max_rows: of one segment.
        """
        ...

    def run(self, batch: ForwardBatch) -> TargetOutput:
        """Run all rows; store their keys and values; return the wanted logits."""
        ...


# Sees the rows of a forward and the residual stream [T, H] after each tap.
Observe = Callable[[ForwardBatch, Sequence[Tensor]], None]


def ignore_rows(batch: ForwardBatch, features: Sequence[Tensor]) -> None:
    """Do nothing with the rows of a forward."""


class EagerRunner:
    """Calls the target directly."""

    def __init__(
        self,
        target: Target,
        attention: AttentionBackend,
        taps: Sequence[int] = (),
        observe: Observe = ignore_rows,
        plan_rows: int = 1,
    ):
        """Take what to call.

        Args:
            target: a decoder.
            attention: of its cache.
            taps: layers whose residual stream is observed.
            observe: sees rows and taps.
            plan_rows: of a request's plan at most. Attention is launched for so many rows of each
                segment, or where there are more, for a prompt's: no length has a kernel of its own.
        """
        self._plan_rows = plan_rows
        self._target = target
        self._attention = attention
        self._taps = tuple(taps)
        self._observe = observe

    def buffers(self, num_rows: int, num_logits: int, max_rows: int) -> ForwardBatch | None:
        """See `ModelRunner.buffers`: there are none."""
        del num_rows, num_logits, max_rows
        return None

    def run(self, batch: ForwardBatch) -> TargetOutput:
        """See `ModelRunner.run`."""
        is_short = batch.max_rows <= self._plan_rows
        most = self._plan_rows if is_short else max(batch.max_rows, LONG_ROWS)
        hidden = self.hidden(replace(batch, max_rows=most))
        logits = self._target.logits(hidden[batch.logit_rows])
        return TargetOutput(logits, tier=batch.num_tokens)

    def hidden(self, batch: ForwardBatch) -> Tensor:
        """Run all rows, have them observed, and return final hidden states [T, H]."""
        self._attention.begin(batch)
        hidden, features = self._target(
            batch.token_ids, batch.positions, self._attention, self._taps
        )
        self._observe(batch, features)
        return hidden
