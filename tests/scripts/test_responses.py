"""Responses are made once, resumed, and the same whoever makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import responses
from responses import prompt_ids, respond

from tests import helpers

OPTIONS = {"max_tokens": 6, "seed": 3, "device": "cpu", "max_model_len": 128, "kv_cache_gib": 0.01}


def make(folder: Path, model: Path, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    return respond(
        folder, str(model), prompts, samples=2, temperatures=[0.0, 1.0], **(OPTIONS | more)
    )


def test_a_killed_run_makes_only_what_is_missing(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = helpers.random_prompts(4, seed=1)
    rows = make(tmp_path, qwen3, prompts)
    assert [row["temperature"] for row in rows] == [0.0, 1.0] * 4
    assert [row["prompt"] for row in rows[::2]] == prompts
    path = tmp_path / "responses-00.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:20])  # killed while writing
    assert make(tmp_path, qwen3, prompts) == rows
    monkeypatch.setattr(responses, "_respond", lambda *_: pytest.fail("all is there"))
    assert make(tmp_path, qwen3, prompts) == rows


def test_responses_to_other_prompts_or_made_otherwise_do_not_count(
    qwen3: Path, tmp_path: Path
) -> None:
    prompts = helpers.random_prompts(4, seed=1)
    first = make(tmp_path, qwen3, prompts)
    swapped = make(tmp_path, qwen3, prompts[::-1])
    assert [row["prompt"] for row in swapped[::2]] == prompts[::-1]
    other_seed = make(tmp_path, qwen3, prompts, seed=4)
    assert other_seed[0]["output"] == first[0]["output"]  # greedy
    assert [row["output"] for row in other_seed] != [row["output"] for row in first]
    assert all(len(row["output"]) == 3 for row in make(tmp_path, qwen3, prompts, max_tokens=3))
    assert make(tmp_path, qwen3, prompts) == first


def test_several_processes_make_the_same_responses(qwen3: Path, tmp_path: Path) -> None:
    prompts = helpers.random_prompts(3, seed=1)
    alone = make(tmp_path / "alone", qwen3, prompts)
    assert make(tmp_path / "two", qwen3, prompts, processes=2) == alone
    assert len(list((tmp_path / "two").iterdir())) == 2


def test_questions_go_through_the_chat_template(qwen3: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question": "the owl"}) + "\n" + json.dumps({"prompt": [7, 8]}))
    question, raw = prompt_ids(str(qwen3), path)
    llm = helpers.make_llm(qwen3)
    assert question == llm.encode_chat([{"role": "user", "content": "the owl"}])
    assert raw == [7, 8]
