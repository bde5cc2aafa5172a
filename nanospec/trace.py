"""A round on one page: what was drafted, what became of it, and what came out."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from nanospec.text import Tokenizer
from nanospec.types import Draft, StepOutput, as_list

_COLOURS = {
    "accepted": "\033[32m",
    "rejected": "\033[31m",
    "cut": "\033[33m",  # accepted, but behind a stop
    "lookahead": "\033[36m",  # computed, not a guess
    "not verified": "\033[2m",
}
_MARKS = {"accepted": "+", "rejected": "x", "cut": "/", "lookahead": "~", "not verified": "."}
_RESET = "\033[0m"


@dataclass(slots=True)
class Tracer:
    """Observes rounds and writes each: as a drawing for people, or as one JSON object a line."""

    out: TextIO
    tokenizer: Tokenizer | None
    as_data: bool = False
    colour: bool = False
    round: int = 0

    def __call__(self, step: StepOutput) -> None:
        """Write one round; rounds that only cache chunks of prompts are numbered, not written."""
        self.round += 1
        if not step.live:
            return
        record = self._record(step)
        if self.as_data:
            self.out.write(json.dumps(record, ensure_ascii=False) + "\n")
        else:
            self.out.write("\n".join(self._drawing(record)) + "\n")
        self.out.flush()

    def _record(self, step: StepOutput) -> dict[str, Any]:
        return {
            "round": self.round,
            "rows": step.num_tokens,
            "tier": step.tier,
            "budget": step.budget,
            "predicted_us": step.predicted_us,
            "kind": step.plan.kind.name.lower(),
            "requests": [self._request(step, index, step.counts[index] - 1) for index in step.live],
        }

    def _request(self, step: StepOutput, index: int, verified: int) -> dict[str, Any]:
        request, emitted = step.requests[index], step.emitted[index]
        root = request.tokens[len(request.tokens) - len(emitted) - 1]
        return {
            "request": request.request_id,
            "root": self._token(root),
            "drafts": list(
                self._drafts(step.drafts[index], verified, step.path[index], len(emitted))
            ),
            "emitted": [self._token(token) for token in emitted],
            "finish_reason": step.reasons[index],
        }

    def _drafts(
        self, draft: Draft | None, verified: int, path: list[int], kept: int
    ) -> Iterator[dict[str, Any]]:
        if draft is None:
            return
        tokens: list[int] = as_list(draft.tokens)
        survival: list[float] = [] if draft.survival is None else as_list(draft.survival)
        lookahead: set[int] = set()
        for row, (token, parent) in enumerate(zip(tokens, draft.parent_rows, strict=True), start=1):
            if parent < 0 or parent in lookahead:
                lookahead.add(row)
            fate = "lookahead" if row in lookahead else "rejected"
            if row in path:
                fate = "accepted" if path.index(row) <= kept else "cut"
            yield {
                "row": row,
                "parent": parent,
                "token": self._token(token),
                "fate": fate if row <= verified else "not verified",
                "survival": survival[row - 1] if survival else None,
            }

    def _token(self, token: int) -> dict[str, Any]:
        text = "" if self.tokenizer is None else self.tokenizer.decode([token])
        return {"id": token, "text": text}

    def _drawing(self, record: dict[str, Any]) -> Iterator[str]:
        yield (
            f"round {record['round']}: {record['rows']} rows in tier {record['tier']}, "
            f"{record['kind']}, {record['budget']} drafts verified"
        )
        for request in record["requests"]:
            emitted = " ".join(_show(token) for token in request["emitted"])
            end = f" ({request['finish_reason']})" if request["finish_reason"] else ""
            yield f"  #{request['request']} {_show(request['root'])} => {emitted}{end}"
            yield from self._tree(request["drafts"], parent=0, indent="     ")
            yield from self._tree(request["drafts"], parent=-1, indent="     ")

    def _tree(self, drafts: list[dict[str, Any]], parent: int, indent: str) -> Iterator[str]:
        """Draw the children of a row: an only child goes on below, siblings branch."""
        children = [draft for draft in drafts if draft["parent"] == parent]
        for index, draft in enumerate(children):
            if len(children) == 1:
                yield indent + self._node(draft)
                yield from self._tree(drafts, draft["row"], indent)
                continue
            is_last = index == len(children) - 1
            yield indent + ("└ " if is_last else "├ ") + self._node(draft)
            yield from self._tree(drafts, draft["row"], indent + ("  " if is_last else "│ "))

    def _node(self, draft: dict[str, Any]) -> str:
        survival = "" if draft["survival"] is None else f" {draft['survival']:.2f}"
        text = f"{_MARKS[draft['fate']]} {_show(draft['token'])}{survival}"
        return f"{_COLOURS[draft['fate']]}{text}{_RESET}" if self.colour else text


def _show(token: dict[str, Any]) -> str:
    return repr(token["text"]) if token["text"] else f"<{token['id']}>"
