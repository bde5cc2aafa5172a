"""The nouns everybody shares: what a user asks for, what the engine works on, what comes back.

Shape symbols, used in every docstring and nowhere redefined:

    T   packed rows of a forward         R   requests (segments) of a forward
    N   anything flat                    V   vocabulary
    H   hidden width                     L   layers
    Hq  query heads                      Hkv key and value heads
    D   width of a head                  S   cache slots
    P   most pages of one request        I   width of the MLP

Words: a *row* is one token in one forward; a *segment* is the run of rows of one request; the
*root* of a request is its last committed token, whose keys and values are not written yet.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nanospec.errors import ConfigError
from nanospec.text import TextStream

FinishReason = Literal["stop", "length", "abort"]

# Below this a temperature means greedy; dividing logits by less loses every digit in fp32 anyway.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and defaults are vLLM's.

    The filters apply in this order: temperature, min-p, top-k, top-p.

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # keep the k most probable tokens; 0 or -1 keeps all
    top_p: float = 1.0  # keep the fewest tokens whose probabilities reach top_p, at least one
    min_p: float = 0.0  # keep tokens at least min_p times as probable as the most probable one
    seed: int | None = None  # None: the engine draws one
    max_tokens: int | None = 16  # None: as many as the context holds
    min_tokens: int = 0  # no stop of any kind before so many tokens
    stop: str | Sequence[str] = ()  # text that ends the output and is cut off
    stop_token_ids: Sequence[int] = ()  # tokens that end the output, beside the model's own
    ignore_eos: bool = False  # go on after the model's end-of-sequence tokens

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, f"temperature={self.temperature}", "0 or more")
        _require(self.top_k >= -1, f"top_k={self.top_k}", "1 or more, or 0 to keep all tokens")
        _require(0 <= self.top_p <= 1, f"top_p={self.top_p}", "between 0 and 1")
        _require(0 <= self.min_p <= 1, f"min_p={self.min_p}", "between 0 and 1")
        if self.seed is not None:
            _require(-(2**63) <= self.seed < 2**63, f"seed={self.seed}", "a 64-bit integer")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, f"max_tokens={self.max_tokens}", "1 or more")
            ok = 0 <= self.min_tokens <= self.max_tokens
            _require(ok, f"min_tokens={self.min_tokens}", f"0 to max_tokens={self.max_tokens}")
        _require(self.min_tokens >= 0, f"min_tokens={self.min_tokens}", "0 or more")
        _require("" not in self.stop_strings, f"stop={self.stop!r}", "non-empty strings")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


def _require(condition: bool, given: str, wanted: str) -> None:
    if not condition:  # a NaN fails every comparison and ends here too
        raise ConfigError(f"{given} is out of range; pass {wanted}")


@dataclass(slots=True)
class Stats:
    """What the rounds of one request, or of many, did. A round verifies a root and its drafts."""

    rounds: int = 0
    drafted: int = 0  # draft tokens proposed
    verified: int = 0  # of these, run through the target
    accepted: int = 0  # of these, kept
    emitted: int = 0  # tokens of rounds: the accepted ones and one more each
    tokens: int = 0  # output tokens, the one that ends the prompt's last chunk included
    seconds: float = 0.0  # wall time, waiting included

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, next token included; 0 without a round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return every field and derived figure, for JSON."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "tokens": self.tokens,
            "acceptance_length": self.acceptance_length,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


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
    tokens: list[int] = field(init=False)  # prompt and committed output
    pages: list[int] = field(default_factory=list)  # in the order of the tokens
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
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `kv_len .. kv_len + num_rows - 1` of one request, to be run in the next forward."""

    request: Request
    num_rows: int

    @property
    def samples(self) -> bool:
        """Whether the last row is the root, so that its logits give the next token."""
        return self.request.kv_len + self.num_rows == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The output of one request."""

    text: str  # without special tokens and without what ended it
    token_ids: list[int]  # up to and including the token that ended it
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # one; a list, as in vLLM
    stats: Stats
