"""GSM8K and files like it: questions as token ids, and which answers are right.

A row of JSON lines has a `question` and an `answer` that ends in `#### N`; the embedded pair's
held-out problems are such rows too.
"""

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from nanospec.errors import ConfigError
from nanospec.prompts import read_prompts
from nanospec.text import Tokenizer

_BOXED = r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}"  # one level of braces inside
_MARKED = re.compile(rf"####((?:(?!\\boxed)[^\n])*)|{_BOXED}")
# A hyphen between two numbers or words is no sign: "10-12" ends in 12.
_NUMBER = re.compile(
    r"((?<![\w.)])[-\u2212])?\$?(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)
_LATEX = {"{,}": ",", r"\,": "", r"\!": "", r"\$": "$"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and the number that answers it."""

    question: str
    answer: Decimal


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """Read a file of JSON lines.

    Args:
        path: rows with `question` and `answer`.
        limit: use so many; None: all.

    Raises:
        ConfigError: the file cannot be read, or a row has no question or no number as answer.
    """
    conversations = read_prompts(path)
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    problems = []
    for conversation, row in list(zip(conversations, rows, strict=True))[:limit]:
        question, answer = conversation.turns[0], final_number(str(row.get("answer", "")))
        if not isinstance(question, str) or answer is None:
            where = f"{path}, row {conversation.index + 1}"
            raise ConfigError(f"{where} needs a question, and an answer that ends in #### N")
        problems.append(Problem(question, answer))
    return problems


def prompt_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """Return a question's token ids, through the chat template if there is one.

    Templates that do not know `enable_thinking` ignore it.
    """
    if not tokenizer.has_chat_template:
        return tokenizer.encode(question)
    messages = [{"role": "user", "content": question}]
    return tokenizer.chat_ids(messages, enable_thinking=False)


def final_number(text: str) -> Decimal | None:
    r"""Return the number of the last `#### N` or `\boxed{N}`; without one, the last number."""
    for written, meant in _LATEX.items():
        text = text.replace(written, meant)
    marked = [
        numbers[0] if match[1] is not None else numbers[-1]
        for match in _MARKED.finditer(text)
        if (numbers := _numbers(match[1] if match[1] is not None else match[2]))
    ]
    found = marked or _numbers(text)
    return found[-1] if found else None


def _numbers(text: str) -> list[Decimal]:
    return [
        Decimal(("-" if sign else "") + digits.replace(",", ""))
        for sign, digits in _NUMBER.findall(text)
    ]


def is_right(text: str, problem: Problem) -> bool:
    """Return whether a response ends in the problem's number."""
    return final_number(text) == problem.answer
