"""How one request is sampled, and when it ends."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def _require(condition: bool, given: str, wanted: str) -> None:
    if not condition:  # a NaN fails every comparison and ends here too
        raise ConfigError(f"{given} is out of range; pass {wanted}")
