"""How one request is sampled, and when it ends; and how rows of logits are, for many requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nanospec.errors import ConfigError

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
    stop: str | Sequence[str] | None = None  # text that ends the output and is cut off
    stop_token_ids: Sequence[int] | None = None  # tokens that end it, beside the model's own
    ignore_eos: bool = False  # go on after the model's end-of-sequence tokens
    speculate: bool = True  # False: decode this request plainly, even inside a speculating batch

    def __post_init__(self) -> None:
        for name in ("top_k", "seed", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            optional = value is None and name in ("seed", "max_tokens")
            _require(optional or type(value) is int, f"{name}={value!r}", "an integer")
        ids = self.stop_ids
        _require(all(type(i) is int for i in ids), f"stop_token_ids={list(ids)}", "integers")
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
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return tuple(self.stop_token_ids or ())

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of N rows of logits is sampled."""

    temperature: Tensor  # [N] fp32
    top_k: Tensor  # [N] int64, V where off
    top_p: Tensor  # [N] fp32, 1 where off
    min_p: Tensor  # [N] fp32, 0 where off
    seed: Tensor  # [N] int64
    position: Tensor  # [N] int64, output position of the token drawn
    min_position: Tensor  # [N] int64, first output position that may be a stop token
    stops: Tensor  # [U] int64, stop tokens of rows that may not stop yet
    is_stop: Tensor  # [N, U] bool, which of them are the row's own
    is_greedy: bool  # host: all rows are
    has_filters: bool  # host: some row has top-k or top-p

    @property
    def is_argmax(self) -> bool:
        """Whether logits alone decide: all rows are greedy, and any token may come."""
        return self.is_greedy and len(self.stops) == 0

    def later(self, count: Tensor) -> "SamplingRows":
        """Return the same rows, each `count` [N] output positions later."""
        return replace(self, position=self.position + count)

    def at(self, index: Tensor, ahead: Tensor | int) -> "SamplingRows":
        """Return rows like those of `index` [N'], each `ahead` [N'] output positions later."""
        position = self.position[index] + ahead
        return SamplingRows(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            position=position,
            min_position=self.min_position[index],
            stops=self.stops,
            is_stop=self.is_stop[index],
            is_greedy=self.is_greedy,
            has_filters=self.has_filters,
        )


def _require(condition: bool, given: str, wanted: str) -> None:
    if not condition:  # a NaN fails every comparison and ends here too
        raise ConfigError(f"{given} is out of range; pass {wanted}")
