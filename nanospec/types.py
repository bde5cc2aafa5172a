"""The nouns everybody shares: what a user asks for, what the engine works on, what comes back.

Shape symbols, used in every docstring and nowhere redefined:

    T   packed rows of a forward         R   requests (segments) of a forward
    N   anything flat                    V   vocabulary
    H   hidden width                     L   layers
    Hq  query heads                      Hkv key and value heads
    D   width of a head                  S   cache slots
    P   most pages of one request        I   width of the MLP
    K   draft tokens of one request      M   most rows of one request in a plan, 1 + K

Words: a *row* is one token in one forward; a *segment* is a run of rows of one request; the *root*
of a request is its last committed token, whose keys and values are not written yet. Row 0 of a
request in a plan is its root, row i its i-th draft token; the *depth* of a row is its distance from
the root. p is the target's distribution, q the drafter's.
"""

import enum
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from torch import Tensor

from nanospec.params import SamplingParams, SamplingRows
from nanospec.stats import Stats
from nanospec.text import TextStream

FinishReason = Literal["stop", "length", "abort"]


class PlanKind(enum.IntEnum):
    """What a plan asks of attention; each kind includes the ones before it."""

    CHAIN = 0  # every row follows the one before it
    TREE = 1  # a row sees its ancestors and stands at its depth
    MASK = 2  # rows state positions and who sees whom themselves


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guesses after a request's root. Row 0 is the root, row i the i-th token here.

    `probs` are what the tokens were drawn from: row i - 1 is the distribution at the *parent* of
    row i, so siblings share one; the first sibling was drawn from it, the next from what is left
    without the first, and so on. Without `probs`, or where a request shares noise, the tokens count
    as a point mass: they are accepted exactly where the target draws them.

    A sampled token's `survival` may depend on tokens before it, never on the token itself, or the
    choice of what is verified would bias the output.
    """

    tokens: Sequence[int] | Tensor  # [K]
    parents: Sequence[int] | None = None  # [K] row numbers, each below its own; None: a chain
    probs: Tensor | None = None  # [K, V] fp32
    survival: Sequence[float] | Tensor | None = None  # [K] P(it and its ancestors are accepted)
    positions: Sequence[int] | None = None  # [K] counted from the root's; None: the depths
    visibility: Sequence[Sequence[bool]] | None = None  # [M, M], lower triangle; None: ancestors
    origin: "DraftRows | None" = None  # the drafts of a whole batch that this is a row of
    row: int = 0  # which

    def __len__(self) -> int:
        """K."""
        # `len` of a tensor takes ten times as long, and every request of every round is asked.
        return self.tokens.shape[0] if isinstance(self.tokens, Tensor) else len(self.tokens)

    def but(self, **changes: Any) -> "Draft":
        """Return it with some fields changed, as `dataclasses.replace` does for other classes."""
        return Draft(**({each.name: getattr(self, each.name) for each in fields(Draft)} | changes))

    @property
    def parent_rows(self) -> Sequence[int]:
        """`parents`, of a chain too."""
        return range(len(self)) if self.parents is None else self.parents

    @property
    def depths(self) -> list[int]:
        """How far from the root each row is; rows without a parent count as its children."""
        found = [0]
        for parent in self.parent_rows:
            found.append(found[max(parent, 0)] + 1)
        return found[1:]


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """Chains that were drafted together, on the device, from which plans take what they need."""

    tokens: Tensor  # [R, K] int64
    probs: Tensor | None  # [R, K, V] fp32
    survival: Tensor | None  # [R, K] fp32

    def drafts(self, lengths: Sequence[int]) -> list[Draft]:
        """Return the first so many of each row, K at most, as a draft."""
        count, width = self.tokens.shape
        pairs = zip(range(count), lengths, strict=True)
        return [DraftRow(self, row, min(length, width)) for row, length in pairs]


class DraftRow(Draft):
    """The start of a row of `DraftRows`, cut out when it is read: views of all rows take long."""

    __slots__ = ("_length",)
    parents = positions = visibility = None
    origin: DraftRows
    _length: int

    def __init__(self, origin: DraftRows, row: int, length: int):
        """Stand for the first `length` drafts of a row."""
        object.__setattr__(self, "origin", origin)
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "_length", length)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what it was made from."""
        return DraftRow, (self.origin, self.row, self._length)

    def __len__(self) -> int:
        """K."""
        return self._length

    @property
    def tokens(self) -> Tensor:
        """See `Draft`."""
        return self.origin.tokens[self.row, : self._length]

    @property
    def probs(self) -> Tensor | None:
        """See `Draft`."""
        q = self.origin.probs
        return None if q is None else q[self.row, : self._length]

    @property
    def survival(self) -> Tensor | None:
        """See `Draft`."""
        alive = self.origin.survival
        return None if alive is None else alive[self.row, : self._length]


@dataclass(frozen=True, slots=True)
class Pending:
    """What a round in flight gives R requests: the device knows it, the host not yet.

    A request that is not in the round gets nothing from it, and its root is the host's.
    """

    roots: Tensor  # [R] int64, the last token of each
    num_tokens: Tensor  # [R] int64, tokens on their way
    sampling: SamplingRows  # [R] how the token after each root is sampled

    def at(self, index: Tensor) -> "Pending":
        """Return what those of `index` [n] get."""
        return Pending(self.roots[index], self.num_tokens[index], self.sampling.at(index, 0))


_Number = TypeVar("_Number", int, float)


def as_list(values: Sequence[_Number] | Tensor) -> list[_Number]:
    """Return a field of a draft on the host; synchronises for a tensor on a GPU."""
    return values.tolist() if isinstance(values, Tensor) else list(values)


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to an output. The one mutable noun; the engine alone changes it.

    Invariant: slots of `pages` hold the keys and values of `tokens[:kv_len]`, and
    `kv_len < len(tokens)` until the request finishes.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # of its random numbers, 64 bits
    stop_token_ids: frozenset[int]  # the model's own included, unless it ignores them
    max_len: int  # most tokens, prompt included
    text: TextStream
    shares_noise: bool = True  # drafts are accepted where they equal the target's own draw
    draft: Draft | None = None  # guesses after the root, for the next round
    max_drafts: int = 0  # draft rows there are pages for in the next round
    in_flight: list[int] = field(default_factory=list)  # rows in each round that is not settled
    tokens: list[int] = field(init=False)  # prompt and committed output
    pages: "array[int]" = field(default_factory=lambda: array("i"))  # in the order of the tokens
    kv_len: int = 0
    num_published: int = 0  # leading pages that the prefix cache knows
    prefix_node: int = 0  # the prefix cache's name for what these pages hold
    finish_reason: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)
    arrival: float = field(default_factory=time.perf_counter)  # seconds

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[len(self.prompt_token_ids) :]

    @property
    def num_output(self) -> int:
        """How many tokens were committed after the prompt."""
        return len(self.tokens) - len(self.prompt_token_ids)

    @property
    def most_tokens(self) -> int:
        """How many tokens there are at most, once all rounds in flight are settled."""
        return len(self.tokens) + sum(self.in_flight)

    @property
    def fewest_tokens(self) -> int:
        """How many tokens there are at least, once all rounds in flight are settled."""
        return len(self.tokens) + len(self.in_flight)

    @property
    def num_planned(self) -> int:
        """How many draft rows the next round verifies: what there is, within `max_drafts`."""
        return 0 if self.draft is None else min(len(self.draft), self.max_drafts)

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """What the next forward verifies: R requests with their roots and drafts, padded to M rows.

    How many rows of a request are really verified lives on the device; the host knows the cap M
    and a total that is never exceeded, and mostly the counts themselves.
    """

    kind: PlanKind
    tokens: Tensor  # [R, M] int64
    parents: Tensor  # [R, M] int64 row numbers, -1 for the root
    num_rows: Tensor  # [R] int64, at least 1
    num_tokens: int  # host, at least the sum of num_rows
    row_counts: list[int] | None  # [R] host copy of num_rows, where it is known
    num_masked: int  # requests that need a mask, the last ones; a chain needs none
    probs: Tensor | None = None  # [R, K, V] fp32, zero where a request has none
    is_sampled: Tensor | None = None  # [R] bool, which requests have probs; None: none has
    positions: Tensor | None = None  # [R, M] int64, counted from the root's; None: the depths
    visibility: Tensor | None = None  # [R, M, M] bool; None: ancestors

    @property
    def num_reqs(self) -> int:
        """R."""
        return self.tokens.shape[0]

    @property
    def max_rows(self) -> int:
        """M."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a plan without gaps: N = `plan.num_tokens` of them, the last ones perhaps unused.

    Unused rows have token, request and depth 0 and the scratch slot.
    """

    token_ids: Tensor  # [N] int64
    slots: Tensor  # [N] int64
    request: Tensor  # [N] int64, index of the row's request in the plan
    depth: Tensor  # [N] int64
    offsets: Tensor  # [R + 1] int64, where each request's rows start, and the end


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What survives of a plan: for each request a path from the root, and the token after it."""

    tokens: Tensor  # [R, M] int64: the path's drafts, then the next token, then anything
    num_emitted: Tensor  # [R] int64, 1..M: accepted drafts and the next token
    path: Tensor  # [R, M] int64: rows 0, a, b, .. of the path, num_emitted of them, then anything


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `kv_len .. kv_len + num_rows - 1` of one request, to be run in the next forward.

    Where the last of them is the root, the request samples and brings its drafts along.
    """

    request: Request
    num_rows: int  # committed tokens without keys and values, the root included

    @property
    def samples(self) -> bool:
        """Whether the last row is the root."""
        return self.request.kv_len + self.num_rows == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows of a forward that became part of a request: those of `tokens[start:end]`.

    Their keys and values are in the cache at their own positions; a drafter's may be put beside.
    """

    request: Request
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a round did, as a speculator sees it. Pages of requests that ended are still held."""

    requests: list[Request]  # [R], those that sampled
    drafts: list[Draft | None]  # [R], of which the plan verified a part
    plan: VerifyPlan
    counts: list[int]  # [R] rows of each in the plan, root included
    emitted: list[list[int]]  # [R] tokens kept, none after a stop
    reasons: list[FinishReason | None]  # [R] why each request ends with this round, if it does
    path: list[list[int]]  # [R] rows of the accepted path, the root first, before stops
    starts: list[int]  # [R] rows of each that were cached before
    chunks: list[CommittedRows]
    logits: Tensor | None  # [N, V] of the packed rows; None where rounds run ahead
    rows: PackedRows  # of the plan, perhaps without unused rows
    num_tokens: int  # rows of the whole forward
    tier: int  # rows that were run, padding included
    predicted_us: float | None  # what the round should take, where costs are known

    @property
    def committed(self) -> list[CommittedRows]:
        """What was cached: chunks first, then the kept part of the requests' paths."""
        rows = zip(self.requests, self.starts, self.emitted, strict=True)
        return self.chunks + [CommittedRows(r, at, at + len(own)) for r, at, own in rows if own]

    @property
    def live(self) -> list[int]:
        """The numbers of the requests that got tokens; others ended with the round before."""
        return [index for index, own in enumerate(self.emitted) if own]

    @property
    def budget(self) -> int:
        """How many drafts were verified of those requests."""
        counts = zip(self.counts, self.emitted, strict=True)
        return sum([count - 1 for count, own in counts if own])

    def deepest(self, index: int) -> int:
        """Return the depth of a request's tree up to which drafts count: none behind a stop.

        What is guessed after the end of a text is nothing drafters learn; its fate says nothing.
        """
        kept = len(self.emitted[index])
        return kept if kept < len(self.path[index]) else self.counts[index]


@dataclass(frozen=True, slots=True)
class Capability:
    """What the attention of one layer can verify, and why not more."""

    kind: PlanKind
    max_rows: int  # of one request, root included
    takes_device_counts: bool  # whether counts may be known on the device only
    reason: str = ""  # why not more; empty where nothing is missing


@dataclass(frozen=True, slots=True)
class Resources:
    """What a speculator declares once, at start-up; no plan of it may exceed this."""

    kind: PlanKind
    max_rows: int  # of one request, root included
    needs_device_counts: bool = False  # its counts are known on the device only
    records_probs: bool = False  # its drafts may come with q, which takes memory
    taps: tuple[int, ...] = ()  # target layers after which it wants the residual stream


@dataclass(frozen=True, slots=True)
class Budget:
    """How much the next round may verify."""

    total_drafts: int  # all requests together
    max_rows_per_request: int  # root included; 1 verifies no drafts, and none are proposed
    max_requests: int | None = None  # that may have any; None: all


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the scheduler knows when a speculator is asked for a budget or a limit."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    page_size: int  # tokens
    count_draft_pages: Callable[[], int] = int  # as it asks every request, only when needed

    @property
    def num_draft_pages(self) -> int:
        """Pages held for draft rows alone."""
        return self.count_draft_pages()
