"""What an engine is asked in a comparison, and the one driver that asks and watches it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nanospec.llm import old_objects_left_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process does: an engine, loaded once, at several concurrencies."""

    engine: str  # nanospec, vllm or url; gaps: see `measure_gaps`
    mode: str = "none"  # none, spec or adaptive; server: whatever the server does
    model: str  # folder or Hugging Face id
    draft: str | None = None  # the same, of a DSpark drafter; None in mode none
    num_draft: int = 7  # K
    dtype: str = "auto"
    load_format: str = "auto"  # or dummy
    has_tokenizer: bool = True  # so that text is made on the way, as for a user
    max_model_len: int  # tokens
    cost_table: str | None = None  # of nanospec, for mode adaptive
    synthetic_acceptance: float | None = None  # of each slot, given those before it
    url: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the engine, beside all this
    prompts: list[list[int]] = field(default_factory=list)
    max_tokens: int = 16
    stop_ids: list[int] = field(default_factory=list)  # they alone end a text
    temperature: float = 0.0
    seed: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)  # requests at once, prompts in all
    forks: list[tuple[list[int], int, int]] = field(default_factory=list)  # of `measure_gaps`

    @property
    def max_num_seqs(self) -> int:
        """Requests at once, at most."""
        return max((load for load, _ in self.loads), default=1)

    @property
    def most_rows(self) -> int:
        """Rows of a step that verifies all drafts of all requests."""
        return self.max_num_seqs * (1 + (self.num_draft if self.draft else 0))


@dataclass(frozen=True, slots=True)
class Update:
    """What a step brought one request."""

    index: int  # of its prompt
    token_ids: list[int] | None  # None where the engine gives text only
    text: str = ""
    finish_reason: str | None = None  # with the last update
    num_tokens: int | None = None  # of the whole output, where `token_ids` do not tell


class AbEngine(Protocol):
    """An engine under test."""

    def start(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Admit a request."""

    def step(self) -> list[Update]:
        """Wait until requests got something, and return it."""

    def drain(self) -> None:
        """Leave nothing behind, after all requests ended."""


def drive(
    engine: AbEngine, prompts: Sequence[Sequence[int]], max_tokens: int, load: int
) -> list[dict[str, Any]]:
    """Run prompts, `load` at once.

    Returns:
        A record per prompt: `admitted`, seconds since the start; `emissions`, pairs of seconds and
        tokens (None: unknown); `token_ids`, up to and including the one that ended it, or None;
        `text`, where ids are None; `num_tokens`; `finish_reason`.
    """
    records: list[dict[str, Any]] = []
    done = 0
    with old_objects_left_alone():
        started = time.perf_counter()
        while done < len(prompts):
            while len(records) < len(prompts) and len(records) - done < load:
                records.append(_new_record(time.perf_counter() - started))
                engine.start(len(records) - 1, prompts[len(records) - 1], max_tokens)
            updates = engine.step()
            now = time.perf_counter() - started
            for update in updates:
                _note(records[update.index], update, now)
                done += update.finish_reason is not None
        engine.drain()
    return records


def _new_record(admitted: float) -> dict[str, Any]:
    return {
        "admitted": admitted,
        "emissions": [],
        "token_ids": [],
        "text": None,
        "num_tokens": 0,
        "finish_reason": None,
    }


def _note(record: dict[str, Any], update: Update, now: float) -> None:
    ids = update.token_ids
    if ids is None:
        record["token_ids"] = None
        record["text"] = (record["text"] or "") + update.text
    else:
        record["token_ids"] += ids
        record["num_tokens"] += len(ids)
    if ids or (ids is None and update.text):
        record["emissions"].append((round(now, 6), None if ids is None else len(ids)))
    if update.num_tokens is not None:
        record["num_tokens"] = update.num_tokens
    record["finish_reason"] = update.finish_reason
