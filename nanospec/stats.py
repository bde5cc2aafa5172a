"""What rounds did, counted: per request, and added up."""

from dataclasses import asdict, dataclass, field
from itertools import accumulate, zip_longest
from typing import Any


@dataclass(slots=True)
class Stats:
    """What the rounds of one request, or of many, did. A round verifies a root and its drafts."""

    rounds: int = 0
    drafted: int = 0  # draft tokens proposed
    verified: int = 0  # of these, run through the target
    accepted: int = 0  # of these, kept
    emitted: int = 0  # tokens of rounds: the accepted ones and one more each, none after a stop
    tokens: int = 0  # output tokens, the one that ends the prompt's last chunk included
    seconds: float = 0.0  # wall time, waiting included
    depths: list[int] = field(default_factory=list)  # rounds whose deepest draft had depth 0, 1, ..
    lengths: list[int] = field(default_factory=list)  # rounds that kept 0, 1, .. drafts; as long

    @property
    def offered(self) -> list[int]:
        """Rounds that verified a draft of depth 1, 2, .."""
        return _at_least(self.depths)

    @property
    def kept(self) -> list[int]:
        """Of these, rounds that kept it."""
        return _at_least(self.lengths)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, next token included; 0 without a round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Share of rounds that kept a draft of depth 1, 2, .. among those that verified one."""
        return [kept / offered for kept, offered in zip(self.kept, self.offered, strict=True)]

    def count_round(self, *, verified: int, depth: int, accepted: int, emitted: int) -> None:
        """Count a round; what a stop cut off is counted neither as kept nor as offered.

        Args:
            verified: draft tokens run through the target.
            depth: of the deepest one verified.
            accepted: drafts accepted, before stops.
            emitted: tokens kept, `accepted + 1` unless a stop cut them.
        """
        if emitted <= accepted:
            accepted = depth = emitted
        self.rounds += 1
        self.verified += verified
        self.accepted += accepted
        self.emitted += emitted
        missing = 1 + depth - len(self.depths)
        if missing > 0:
            self.depths += [0] * missing
            self.lengths += [0] * missing
        self.depths[depth] += 1
        self.lengths[accepted] += 1

    def add(self, other: "Stats") -> None:
        """Add the counts of another; seconds are left alone, as requests overlap."""
        for name in ("rounds", "drafted", "verified", "accepted", "emitted", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("depths", "lengths"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [left + right for left, right in pairs])

    def as_dict(self) -> dict[str, Any]:
        """Return every field and derived figure, for JSON."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "tokens": self.tokens,
            "acceptance_length": self.acceptance_length,
            "acceptance_rates": self.acceptance_rates,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def _at_least(rounds: list[int]) -> list[int]:
    """Return how many rounds had 1 or more, 2 or more, .., of how many had 0, 1, .."""
    return list(accumulate(reversed(rounds[1:])))[::-1]


@dataclass(slots=True)
class StepStats:
    """What the forwards of an engine did, counted: each serves all its requests at once."""

    steps: int = 0
    rows: int = 0  # run through the target: prompts, roots, drafts
    padding: int = 0  # rows run beside them, to fill up a tier
    budget: int = 0  # drafts verified
    tiers: dict[int, int] = field(default_factory=dict)  # rows with padding: steps of that size
    seconds: float = 0.0  # wall time
    predicted_steps: int = 0  # those whose time a cost table predicted
    predicted_seconds: float = 0.0  # of these, as predicted
    measured_seconds: float = 0.0  # of these, as measured
    missed_seconds: float = 0.0  # of these, how far apart the two were, added up

    def count_step(
        self, *, rows: int, tier: int, budget: int, seconds: float, predicted_us: float | None
    ) -> None:
        """Count a step.

        Args:
            rows: of the forward, without padding.
            tier: with it.
            budget: of the rows, those that are drafts.
            seconds: wall time.
            predicted_us: by a cost table, where there is one.
        """
        self.steps += 1
        self.rows += rows
        self.padding += tier - rows
        self.budget += budget
        self.tiers[tier] = self.tiers.get(tier, 0) + 1
        self.seconds += seconds
        if predicted_us is not None:
            self.predicted_steps += 1
            self.predicted_seconds += predicted_us / 1e6
            self.measured_seconds += seconds
            self.missed_seconds += abs(seconds - predicted_us / 1e6)

    def summary(self) -> str:
        """Return a line for people."""
        steps = max(self.steps, 1)
        text = (
            f"{self.steps} steps of {self.rows / steps:.1f} rows on average, "
            f"{self.budget / steps:.1f} of them drafts, and "
            f"{self.padding / max(self.rows, 1):.1%} padding, {1e3 * self.seconds / steps:.2f} ms"
        )
        if self.predicted_steps:
            predicted, measured = (
                1e3 * each / self.predicted_steps
                for each in (self.predicted_seconds, self.measured_seconds)
            )
            missed = self.missed_seconds / self.measured_seconds
            text += (
                f"; the {self.predicted_steps} with a prediction: {predicted:.2f} ms predicted, "
                f"{measured:.2f} ms taken, {missed:.0%} apart"
            )
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return every field, for JSON."""
        return asdict(self) | {"tiers": dict(sorted(self.tiers.items()))}
