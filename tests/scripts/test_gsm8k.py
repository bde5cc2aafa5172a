"""Questions become prompts, and the number that a response ends in is found."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from gsm8k import Problem, final_number, is_right, prompt_ids, read_problems

from nanospec import LLM
from nanospec.config import EMBEDDED_PAIR
from nanospec.errors import ConfigError
from nanospec.text import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "data"

CASES = [
    ("She makes 9 * 2 = $18.\n#### 18", "18"),
    ("####18", "18"),
    ("#### $1,234.50", "1234.5"),
    ("#### -7", "-7"),
    ("#### \u22127", "-7"),
    ("#### 12.00", "12"),
    ("#### 18 eggs of 20", "18"),
    ("#### 3\nNo, wait.\n#### 4", "4"),
    ("#### 18\nThat took 5 steps.", "18"),
    ("####\nThe answer is 6.", "6"),
    (r"The answer is \boxed{42}.", "42"),
    (r"\boxed{\$1{,}200}", "1200"),
    (r"\boxed{x = 5}", "5"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"\boxed{-3.50}, which is 2 less", "-3.5"),
    (r"\boxed{7} or #### 8", "8"),
    (r"#### 8, that is \boxed{9}", "9"),
    (r"#### \boxed{10}", "10"),
    ("So 16 - 3 - 4 = 9 eggs, and 9 * 2 = 18.", "18"),
    ("It costs $1,000,000!", "1000000"),
    ("**72**", "72"),
    ("about 10-12", "12"),
    ("It falls to -$5.25.", "-5.25"),
    ("the total is 3.5.", "3.5"),
    ("They ate 25% of it", "25"),
    ("half, that is .5", "0.5"),
    ("1234567", "1234567"),
    ("first 1,2 then 3, and so on", "3"),
    ("I cannot say.", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "number"), CASES)
def test_the_final_number_is_found(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_answers_are_compared_as_numbers() -> None:
    problem = Problem("?", Decimal(1200))
    assert is_right("$1,200.00.", problem)
    assert not is_right("1,200.01", problem)
    assert not is_right("no idea", problem)


def test_the_files_at_hand_are_read() -> None:
    assert len(read_problems(DATA / "gsm8k_20.jsonl")) == 20
    first, second = read_problems(DATA / "gsm8k_20.jsonl", 2)
    assert (first.answer, second.answer) == (18, 3)
    assert len(read_problems(DATA / "word_problems_heldout.jsonl")) == 200


@pytest.mark.parametrize("row", [{"question": "How many?"}, {"prompt": [1, 2], "answer": "#### 1"}])
def test_a_row_that_cannot_be_asked_or_judged_is_named(
    tmp_path: Path, row: dict[str, object]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' + json.dumps(row))
    with pytest.raises(ConfigError, match="row 2 needs a question"):
        read_problems(path)


def test_a_question_goes_through_the_template_without_thinking(tmp_path: Path) -> None:
    embedded = EMBEDDED_PAIR / "target"
    tokenizer = Tokenizer.load(embedded)
    assert tokenizer is not None
    message = {"role": "user", "content": "Tom has 3"}
    llm = LLM(device="cpu", kv_cache_gib=0.01, max_model_len=64)
    assert prompt_ids(tokenizer, "Tom has 3") == llm.encode_chat([message])
    (tmp_path / "tokenizer.json").write_bytes((embedded / "tokenizer.json").read_bytes())
    raw = Tokenizer.load(tmp_path)
    assert raw is not None and prompt_ids(raw, "Tom") == raw.encode("Tom")
    template = "{% if enable_thinking is false %}none{% else %}think{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    knowing = Tokenizer.load(tmp_path)
    assert knowing is not None and knowing.decode(prompt_ids(knowing, "Tom")) == "none"
