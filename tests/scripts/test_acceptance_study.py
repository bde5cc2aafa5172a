"""What is accepted: arms that share budgets out, group by group; speculators and rules."""

import json
from pathlib import Path
from typing import Any

import acceptance_study
import pytest
from acceptance_study import acceptance, final_number

from nanospec.config import EMBEDDED_PAIR

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "A"
ARMS = ["K=5", "K=7", "adaptive"]


def study(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[str], dict[str, Any]]:
    """Return the tables and the JSON of a run."""
    acceptance_study.main([*options, "--device", "cpu"])
    *tables, last = capsys.readouterr().out.splitlines()
    return tables, json.loads(last)


def test_the_arms_are_compared_family_by_family(capsys: pytest.CaptureFixture[str]) -> None:
    tables, found = study(capsys, "budgets", "--count", "8", "--max-num-seqs", "8")
    arms, prompts = found["arms"], found["prompts"]
    assert list(arms) == ARMS and prompts["all"] == 8 == sum(prompts.values()) / 2
    for name, verified in zip(ARMS, (5, 7, 5), strict=True):
        own = dict(arms[name])
        total = own.pop("all")
        assert total["verified"] == pytest.approx(verified, abs=0.5)
        assert sum(each["rounds"] for each in own.values()) == total["rounds"]
        assert set(own) | {"all"} == set(prompts)
    rows = {line.split()[0]: line.split() for line in tables[1 : 1 + len(prompts)]}
    assert list(rows) == list(prompts)
    ratio = arms["adaptive"]["all"]["length"] / arms["K=5"]["all"]["length"]
    assert rows["all"][-1] == f"{ratio - 1:.1%}"
    # The arm that verifies most is held against its predictions.
    depths = found["calibration"]["depths"]
    assert [own["depth"] for own in depths] == list(range(1, 8))
    assert depths[0]["count"] == arms["K=7"]["all"]["rounds"]
    observed = [own["mean_observed"] for own in depths]
    assert observed == sorted(observed, reverse=True) and observed[0] > 0.5


@pytest.mark.parametrize(
    "speculator",
    ["ngram", *(pytest.param(name, marks=pytest.mark.slow) for name in ("trie", "draft"))],
)
def test_drafters_without_confidences_are_served_by_an_estimator(
    speculator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["budgets", "--speculator", speculator, "--count", "2", "--max-tokens", "24"]
    if speculator == "draft":
        options += ["--draft", str(EMBEDDED_PAIR / "target")]
    _, found = study(capsys, *options)
    verified = {name: own["all"]["verified"] for name, own in found["arms"].items()}
    assert 0 < verified["K=5"] < verified["K=7"] and verified["adaptive"] < verified["K=7"]
    assert 0 < found["calibration"]["mean_predicted"] < 1


def test_every_file_of_prompts_is_a_group(
    qwen3: Path, dflash: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"turns": ["the quick brown fox", "again"]}\n{"question": "the owl"}\n')
    command = f"budgets --model {qwen3} --draft {dflash} --prompts {prompts} {chat} --count 4"
    tables, found = study(capsys, *command.split(), "--max-tokens", "6")
    assert found["prompts"] == {"chat": 2, "prompts": 4, "all": 6}
    assert [line.split()[0] for line in tables[1:4]] == ["chat", "prompts", "all"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompts a/one.jsonl b/one.jsonl", "no two may be the same"),
        ("--prompts all.jsonl", "none 'all'"),
        ("--model models/any", "--prompts"),
    ],
)
def test_groups_that_cannot_be_told_apart_are_refused(options: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        acceptance_study.main(["budgets", *options.split()])


def test_the_reliability_plot_is_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "reliability.png"
    study(capsys, "budgets", "--count", "2", "--max-tokens", "9", "--reliability", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_study_measures_every_speculator_and_rule(drafter: Path) -> None:
    found = acceptance(
        str(GOLDEN / "target"),
        str(drafter),
        [list(range(3, 16)), list(range(20, 29))],
        speculators=[("dspark", 7), ("dspark-tree", 12)],
        temperatures=[0.0, 1.0],
        max_tokens=16,
        device="cpu",
    )
    cases = [(row["speculator"], row["temperature"], row["acceptance"]) for row in found]
    assert cases == [
        ("dspark", 1.0, "rejection"),
        ("dspark", 0.0, "equal tokens"),
        ("dspark", 1.0, "shared-noise"),
        ("dspark-tree", 0.0, "equal tokens"),
        ("dspark-tree", 1.0, "shared-noise"),
    ]
    assert all(row["length"] >= 1 and row["rounds"] > 0 for row in found)


def test_a_drafter_without_confidences_is_studied_but_not_calibrated(
    qwen3: Path, dflash: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"speculators --model {qwen3} --draft {dflash} --problems {prompts} --max-tokens 9"
    _, found = study(capsys, *command.split(), "--max-model-len", "64")
    assert "calibration_error" not in found and found["exact_match"] == 0


def test_the_study_prints_a_table_and_everything_as_json(
    drafter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"speculators --model {GOLDEN / 'target'} --draft {drafter} --problems {prompts}"
    options = "--limit 6 --max-tokens 9 --max-model-len 64"
    table, found = study(capsys, *command.split(), *options.split())
    assert found["prompts"] == 6 and set(found["calibration_error"]) == {"greedy", "sampled"}
    assert sum(line.startswith("dspark") for line in table) == len(found["acceptance"]) == 5


@pytest.mark.parametrize(
    ("text", "number"), [("so\n#### 1,234", "1234"), ("#### 5 #### -7.5", "-7.5"), ("5", None)]
)
def test_the_final_number_follows_the_last_mark(text: str, number: str | None) -> None:
    assert final_number(text) == number
