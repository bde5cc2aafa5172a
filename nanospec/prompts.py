"""Files of prompts, and the files their answers go to: JSON lines, checked before anything runs."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanospec.errors import ConfigError
from nanospec.text import Message
from nanospec.types import Request


@dataclass(slots=True)
class Conversation:
    """One row of a prompts file: a raw prompt, or user turns that are answered one by one."""

    index: int  # row in the file, from 0
    source: Any  # the prompt as the row gives it
    turns: list[str | list[int]]
    messages: list[Message] = field(default_factory=list)
    replies: list[Request] = field(default_factory=list)
    error: str | None = None


def read_prompts(path: Path) -> list[Conversation]:
    """Read a file of JSON lines, each with a field `prompt`, `question` or `turns`.

    Raises:
        ConfigError: the file or one of its lines cannot be used; the line is named.
    """
    try:
        lines = _lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} holds no prompts")
    return [
        _read_prompt(f"{path}, line {number}", index, line)
        for index, (number, line) in enumerate(numbered)
    ]


def _read_prompt(where: str, index: int, line: str) -> Conversation:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # too deep, or a number too long, is no better
        raise ConfigError(f"{where} is not JSON: {error}") from error
    known = ("prompt", "question", "turns")
    names = [name for name in known if name in row] if isinstance(row, dict) else []
    if len(names) != 1:
        raise ConfigError(f"{where} needs one of the fields prompt, question and turns")
    source = row[names[0]]
    turns = source if names[0] == "turns" else [source]
    if not isinstance(turns, list) or not turns or not all(_is_turn(turn) for turn in turns):
        raise ConfigError(f"{where}: {names[0]} is empty or is not text")
    return Conversation(index=index, source=source, turns=turns)


def _lines(text: str) -> list[str]:
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, unescaped.
    return text.removesuffix("\n").split("\n")


def _is_turn(turn: Any) -> bool:
    if isinstance(turn, str):
        return bool(turn.strip())
    return isinstance(turn, list) and bool(turn) and all(isinstance(t, int) for t in turn)


def finished_rows(
    path: Path, conversations: list[Conversation], run: dict[str, Any], *, resume: bool
) -> dict[int, dict[str, Any]]:
    """Return the rows that an output file holds, and cut off a line left incomplete there.

    Args:
        path: of the output file, which may not exist yet.
        conversations: what is to be answered.
        run: model and sampling options, which every row states.
        resume: whether the file may hold rows already.

    Returns:
        The finished rows, by index.

    Raises:
        ConfigError: the file cannot be written, belongs to other prompts or options, or holds
            something although the run is not to be resumed.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"--output {path} is no file")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; --output {path} cannot be written")
    if not path.exists() or path.stat().st_size == 0:
        return {}
    if not resume:
        raise ConfigError(f"{path} exists; pass --resume to go on with it, or another --output")
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    rows = {}
    for number, line in enumerate(complete.split(b"\n")[:-1], start=1):
        row = _read_row(f"{path}, line {number}", line, conversations, run)
        rows[row["index"]] = row
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    return rows


def _read_row(
    where: str, line: bytes, conversations: list[Conversation], run: dict[str, Any]
) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        index, source, own = row["index"], row["prompt"], row["run"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{where} is no row that --output wrote") from None
    known = type(index) is int and 0 <= index < len(conversations)
    if not known or conversations[index].source != source:
        raise ConfigError(f"{where} belongs to other prompts")
    different = sorted(name for name in run if own.get(name) != run[name])
    if different:
        name = different[0]
        raise ConfigError(
            f"{where} was made with {name}={own.get(name)!r}, this run has {run[name]!r}; resume "
            f"with the same options, or write another --output"
        )
    return row
