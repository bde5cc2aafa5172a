"""The command line: results on stdout, everything else on stderr, bad input in one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanospec.config import EngineConfig
from nanospec.generate import _parser, main
from tests import helpers

Capture = pytest.CaptureFixture[str]


def cli(folder: Path, *arguments: str) -> int:
    options = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "256")
    return main(["--model", str(folder), *options, "--max-tokens", "8", "--ignore-eos", *arguments])


def write_prompts(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_engine_option_has_a_flag_of_its_name() -> None:
    flags = vars(_parser().parse_args(["--model", "x", "y"]))
    config = EngineConfig(model="x")
    for name in set(EngineConfig.__dataclass_fields__) - {"seed"}:  # --seed is the requests'
        assert flags[name] == getattr(config, name), name


def test_text_streams_to_stdout_and_statistics_go_to_stderr(qwen3: Path, capsys: Capture) -> None:
    assert cli(qwen3, "the owl", "--no-chat") == 0
    out, err = capsys.readouterr()
    llm = helpers.make_llm(qwen3)
    assert out == llm.generate("the owl", helpers.greedy(8))[0].outputs[0].text + "\n"
    assert "8 tokens" in err and "acceptance length 1.00" in err


def test_chat_is_the_default_where_there_is_a_template(qwen3: Path, capsys: Capture) -> None:
    cli(qwen3, "hi", "--json")
    chat = json.loads(capsys.readouterr().out)
    cli(qwen3, "hi", "--json", "--no-chat")
    raw = json.loads(capsys.readouterr().out)
    assert len(chat["prompt_token_ids"]) > len(raw["prompt_token_ids"])


def test_json_is_one_document_with_statistics(qwen3: Path, capsys: Capture) -> None:
    assert cli(qwen3, "the owl", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["finish_reason"] == "length" and len(document["token_ids"]) == 8
    stats = document["stats"]
    assert (stats["rounds"], stats["drafted"], stats["verified"], stats["accepted"]) == (7, 0, 0, 0)
    assert stats["acceptance_length"] == 1.0
    assert stats["seconds"] > 0 and stats["tokens_per_second"] > 0


def test_a_file_of_prompts_is_answered_row_by_row(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    rows = [{"prompt": "the owl"}, {"question": "12 + 34", "answer": "46"}, {"turns": ["a", "b"]}]
    prompts = write_prompts(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    assert cli(qwen3, "--prompts", str(prompts), "--output", str(output)) == 0
    out, err = capsys.readouterr()
    assert out == "" and "3/3" in err
    written = {row["index"]: row for row in read_rows(output)}
    assert sorted(written) == [0, 1, 2]
    assert written[1]["prompt"] == "12 + 34"
    assert len(written[2]["replies"]) == 2 and written[2]["text"] == written[2]["replies"][1]
    assert written[2]["stats"]["tokens"] == 16
    llm = helpers.make_llm(qwen3)
    first = llm.encode_chat([{"role": "user", "content": "a"}])
    reply = llm.generate(first, helpers.greedy(8))[0].outputs[0].text
    assert written[2]["replies"][0] == reply
    dialogue = [("user", "a"), ("assistant", reply), ("user", "b")]
    messages = [{"role": role, "content": content} for role, content in dialogue]
    assert written[2]["prompt_token_ids"] == llm.encode_chat(messages)


def test_other_line_separators_inside_a_prompt_are_text(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    prompt = "one\u2028two\x85three"
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    arguments = ("--prompts", str(path), "--output", str(output))
    assert cli(qwen3, *arguments) == 0
    assert cli(qwen3, *arguments, "--resume") == 0
    assert [json.loads(line)["prompt"] for line in output.read_text().split("\n")[:-1]] == [prompt]


def test_without_an_output_file_rows_go_to_stdout(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    prompts = write_prompts(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": [5, 6]}])
    assert cli(qwen3, "--prompts", str(prompts)) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(row["index"] for row in rows) == [0, 1]
    assert cli(qwen3, "--prompts", str(prompts), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stats"]["tokens"] == 16
    assert [row["index"] for row in document["outputs"]] == [0, 1]


@pytest.mark.parametrize("kept", [0, 2])
def test_an_interrupted_run_is_resumed_where_it_stopped(
    qwen3: Path, tmp_path: Path, capsys: Capture, kept: int
) -> None:
    rows = [{"prompt": f"owl {index}"} for index in range(5)]
    prompts = write_prompts(tmp_path / "in.jsonl", rows)
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    sampling = ("--temperature", "0.9", "--seed", "3")
    assert cli(qwen3, "--prompts", str(prompts), "--output", str(whole), *sampling) == 0
    lines = whole.read_text().splitlines(keepends=True)
    broken.write_text("".join(lines[:kept]) + lines[kept][:20])  # killed in the middle of a line
    arguments = ("--prompts", str(prompts), "--output", str(broken), *sampling)
    assert cli(qwen3, *arguments) == 2  # nothing is overwritten by mistake
    assert "--resume" in capsys.readouterr().err
    assert cli(qwen3, *arguments, "--resume", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["index"] for row in document["outputs"]] == [0, 1, 2, 3, 4]

    def key(path: Path) -> list[tuple[int, list[int]]]:
        return sorted((row["index"], row["token_ids"]) for row in read_rows(path))

    assert key(broken) == key(whole)
    assert broken.read_text().startswith("".join(lines[:kept]))


def test_rows_are_written_as_they_finish(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from nanospec.engine.engine import Engine

    rows = [{"prompt": "owl"}, {"turns": ["owl", "again", "again"]}]
    prompts, output = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    step, lengths = Engine.step, []

    def interrupted(engine: Engine) -> object:
        lengths.append(len(output.read_text().splitlines()) if output.exists() else 0)
        if lengths[-1] == 1:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert cli(qwen3, "--prompts", str(prompts), "--output", str(output)) == 130
    assert [row["index"] for row in read_rows(output)] == [0]
    assert "interrupted" in capsys.readouterr().err


def test_text_is_written_while_it_is_made(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from nanospec.engine.engine import Engine

    step, seen = Engine.step, []

    def watched(engine: Engine) -> object:
        seen.append(capsys.readouterr().out)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    assert cli(qwen3, "the owl", "--no-chat") == 0
    assert sum(bool(text) for text in seen) >= 3


def test_each_row_of_a_file_has_a_seed_of_its_own(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    prompts = write_prompts(tmp_path / "in.jsonl", [{"prompt": "owl"}] * 3)
    options = ("--prompts", str(prompts), "--json", "--temperature", "1", "--seed")
    assert cli(qwen3, *options, "4") == 0
    first = json.loads(capsys.readouterr().out)["outputs"]
    assert cli(qwen3, *options, "5") == 0
    second = json.loads(capsys.readouterr().out)["outputs"]
    assert len({tuple(row["token_ids"]) for row in first}) == 3
    assert first[1]["token_ids"] == second[0]["token_ids"]


def test_resuming_with_other_options_is_refused(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    prompts = write_prompts(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    arguments = ("--prompts", str(prompts), "--output", str(tmp_path / "out.jsonl"))
    assert cli(qwen3, *arguments) == 0
    assert cli(qwen3, *arguments, "--resume", "--temperature", "2") == 2
    assert "temperature=0.0, this run has 2.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        '{"index": "0", "prompt": "a", "run": {}}',
        '{"index": -1, "prompt": "a", "run": {}}',
        '{"index": 7, "prompt": "a", "run": {}}',
        '{"prompt": "a"}',
        "[1]",
        "\xff",
        "[" * 100_000,
    ],
)
def test_an_output_that_is_not_ours_is_refused_and_kept(
    qwen3: Path, tmp_path: Path, capsys: Capture, content: str
) -> None:
    prompts, output = write_prompts(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out"
    output.write_bytes(content.encode("latin-1") + b"\n")
    before = output.read_bytes()
    assert cli(qwen3, "--prompts", str(prompts), "--output", str(output), "--resume") == 2
    assert capsys.readouterr().err.count("\n") == 1 and output.read_bytes() == before


@pytest.mark.parametrize("output", [".", "/proc/out.jsonl", "/dev/full"])
def test_an_output_that_cannot_be_written_is_one_line(
    qwen3: Path, tmp_path: Path, capsys: Capture, output: str
) -> None:
    prompts = write_prompts(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert cli(qwen3, "--prompts", str(prompts), "--output", output) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "| true"])
def test_a_stdout_that_takes_nothing_is_no_traceback(qwen3: Path, redirect: str) -> None:
    command = f"{sys.executable} -m nanospec.generate --model {qwen3} --device cpu hi {redirect}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, errors="replace"
    )
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_resuming_with_other_prompts_is_refused(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "out.jsonl"
    first = write_prompts(tmp_path / "a.jsonl", [{"prompt": "a"}])
    other = write_prompts(tmp_path / "b.jsonl", [{"prompt": "b"}])
    assert cli(qwen3, "--prompts", str(first), "--output", str(output)) == 0
    before = output.read_text()
    assert cli(qwen3, "--prompts", str(other), "--output", str(output), "--resume") == 2
    assert "other prompts" in capsys.readouterr().err
    assert output.read_text() == before


def test_a_dialogue_that_outgrows_the_context_keeps_its_first_replies(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    rows = [{"turns": ["a", "b" * 300]}, {"prompt": "fine"}]
    prompts = write_prompts(tmp_path / "in.jsonl", rows)
    assert cli(qwen3, "--prompts", str(prompts)) == 1
    out, err = capsys.readouterr()
    written = {row["index"]: row for row in map(json.loads, out.splitlines())}
    assert "no room" in written[0]["error"] and len(written[0]["replies"]) == 1
    assert "error" not in written[1] and "1 rows ended early" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ('{"text": "a"}\n', "line 1 needs one of"),
        ('["a"]\n', "line 1 needs one of"),
        ('"prompt"\n', "line 1 needs one of"),
        ("3\n", "line 1 needs one of"),
        ('{"prompt": "a", "question": "b"}\n', "line 1 needs one of"),
        ('\n{"prompt": ""}\n', "line 2: prompt is empty"),
        ('{"turns": []}\n', "line 1: turns is empty"),
        ('{"turns": "a"}\n', "line 1: turns is empty"),
        ('{"prompt": ["a"]}\n', "line 1: prompt is empty or is not text"),
        ("[" * 100_000 + "\n", "line 1 is not JSON"),
        ('{"prompt": ' + "1" * 5000 + "}\n", "line 1 is not JSON"),
        ('{"prompt": "\\ud800"}\n', "not valid Unicode"),
        ("", "holds no prompts"),
        ('{"prompt": [5, 99999]}\n', "row 1: token id 99999"),
        ('{"prompt": "%s"}\n' % ("long " * 300), "row 1: the prompt has"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(
    qwen3: Path, tmp_path: Path, capsys: Capture, content: str, message: str
) -> None:
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(content)
    assert cli(qwen3, "--prompts", str(prompts), "--output", str(output)) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1", "hi"], "temperature"),
        (["--top-p", "2", "hi"], "top_p"),
        (["--max-tokens", "0", "hi"], "max_tokens"),
        (["--page-size", "0", "hi"], "page_size"),
        (["--max-model-len", "9999", "hi"], "9999"),
        (["--max-draft-len", "64", "hi"], "max_draft_len"),
        (["--speculator", "oracle", "hi"], "oracle"),
        (["--speculator", "draft", "hi"], "--draft"),
        (["--speculator", "no.such:Thing", "hi"], "no.such:Thing"),
        (["--speculator", "json:JSONDecoder", "hi"], "no subclass"),
        (["--speculator", "ngram", "--draft", "x", "hi"], "takes no drafter"),
        (["--trace", "no/such/folder/file", "hi"], "no folder"),
        ([], "either a prompt or --prompts"),
        (["--trace", "hi"], "right after --trace"),
        (["hi", "--prompts", "x"], "either a prompt or --prompts"),
        (["--resume", "hi"], "--output"),
        (["--output", "x", "hi"], "--prompts"),
        (["--prompts", "no-such-file"], "no-such-file"),
        ([" "], "empty"),
        (["b" * 300], "no room"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    qwen3: Path, capsys: Capture, arguments: list[str], message: str
) -> None:
    assert cli(qwen3, *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    "arguments",
    [["--temprature", "1", "hi"], ["--dtype", "int8", "hi"], ["--max-tokens", "x", "hi"]],
)
def test_bad_flags_are_one_line_and_exit_code_2(
    qwen3: Path, capsys: Capture, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        cli(qwen3, *arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_model_and_a_missing_template_are_one_line(
    qwen3: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert cli(tmp_path / "nowhere", "hi") == 2
    assert "folder" in capsys.readouterr().err
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((qwen3 / name).read_bytes())
    assert cli(tmp_path, "hi", "--chat") == 2
    assert "chat template" in capsys.readouterr().err
    assert cli(tmp_path, "hi") == 0  # without a template a raw prompt is the default


def test_it_runs_as_a_module(qwen3: Path) -> None:
    command = [sys.executable, "-m", "nanospec.generate", "--model", str(qwen3), "--device", "cpu"]
    done = subprocess.run(
        [*command, "the owl", "--max-tokens", "3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and "3 tokens" in done.stderr
