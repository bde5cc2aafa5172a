"""Engines are compared: jobs, bookkeeping, servers, forks. A stub stands in for vLLM."""

import itertools
import json
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ab_engines
import ab_report
import ab_vllm
import pytest
from ab_engines import graph_sizes, measure_gaps, vllm_options
from ab_job import Job, Update, drive
from ab_task import prepare

from nanospec import LLM, SamplingParams
from nanospec.config import EMBEDDED_PAIR
from nanospec.spec.budget import CostTable
from nanospec.spec.registry import SPECULATORS
from nanospec.spec.speculator import about

STUB = Path(__file__).parent / "stub"
CPU = {"device": "cpu", "kv_cache_gib": 0.1}
SMALL = ["--max-tokens", "16", "--nanospec-options", json.dumps(CPU)]
TARGET, DRAFTER = (str(EMBEDDED_PAIR / name) for name in ("target", "drafter"))
QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4. How many does he have?"}]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stub, importable and fresh."""
    monkeypatch.syspath_prepend(str(STUB))
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import vllm

    yield vllm
    for name in ("vllm", "vllm.sampling_params"):
        sys.modules.pop(name, None)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run jobs in this process, which saves its start."""

    def run(command: Sequence[str], **streams: Any) -> Any:
        try:
            ab_engines.main(command[2:])
        except (Exception, SystemExit) as error:
            streams["stdout"].write("".join(traceback.format_exception(error)).encode())
            return SimpleNamespace(returncode=1)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(ab_vllm, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setitem(SPECULATORS, "synthetic", SPECULATORS["dspark"])  # undone with the patch


def compared(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    """Run the command; return its document."""
    ab_vllm.main([*command, *SMALL])
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.usefixtures("here")
def test_equal_engines_come_out_equal(
    vllm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"--limit 3 --concurrency 1,2 --keep {tmp_path}/raw --out {tmp_path}/results/ab"
    found = compared(capsys, *command.split())
    assert found["failed"] == [] and found["versions"]["vllm"] == "0.0-stub"
    keys = {(row["engine"], row["mode"], row["concurrency"]) for row in found["rows"]}
    assert keys == set(itertools.product(("nanospec", "vllm"), ("none", "spec"), (1, 2)))
    across = [own for own in found["pairs"] if own["other"].startswith("vllm s")]
    within = [own for own in found["pairs"] if own["one"].split()[0] == own["other"].split()[0]]
    assert len(found["pairs"]) == 8 and len(across) == 2 and len(within) == 4
    for own in found["pairs"]:
        assert own["identical"] == 1.0 and own["forks"] == []
    assert [own["acceptance_ratio"] for own in across] == [1.0, 1.0]
    plain, chain = vllm.LLM.seen
    assert plain["enable_prefix_caching"] is False and "speculative_config" not in plain
    assert chain["speculative_config"]["num_speculative_tokens"] == 7
    assert len(list((tmp_path / "raw").glob("*.json"))) == 8  # a job and its output, of four
    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert {"ab.md", "ab.json"} <= written
    assert json.loads((tmp_path / "results" / "ab.json").read_text()) == found


@pytest.mark.usefixtures("here")
def test_a_wrong_token_is_no_near_tie(vllm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    vllm.LLM.wrong.add((1, 5))
    found = compared(capsys, "--limit=2", "--concurrency=2", "--modes=none")
    (own,) = found["pairs"]
    (fork,) = own["forks"]
    assert own["identical"] == 0.5 and own["num_near_ties"] == 0 and not own["holds"]["outputs"]
    assert (fork["prompt"], fork["position"]) == (1, 5)
    assert fork["gap"]["behind"] > fork["gap"]["noise"] and own["holds"]["accuracy"]


def test_what_can_run_runs_though_a_job_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own."""
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.syspath_prepend(str(STUB))  # where the command looks whether vLLM is there
    options = ["--vllm-options", '{"fail": "out of memory"}', "--engines", "vllm,nanospec"]
    command = ["--limit=1", "--concurrency=1", "--modes=none", *options, *SMALL]
    with pytest.raises(SystemExit) as exit_info:
        ab_vllm.main(command)
    assert exit_info.value.code == 1
    output = capsys.readouterr()
    found = json.loads(output.out.splitlines()[-1])
    assert found["failed"] == ["vllm none, seed 0"]
    assert [row["engine"] for row in found["rows"]] == ["nanospec"]
    assert "RuntimeError: out of memory" in output.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--engines nanospec,vllm", "vLLM is not installed; pip install vllm, or pass --engines"),
        ("--engines nanospec,sglang", "'sglang' is unknown"),
        ("--engines nanospec --modes fast", "'fast' is unknown"),
        ("--engines url", "needs --engine-url"),
        ("--engines nanospec --model here", "need --draft"),
        ("--engines nanospec --draft there", "needs the --model"),
        ("--engines nanospec --model here --shapes qwen3-8b --modes none", "leave out --model"),
        ("--engines nanospec --modes adaptive", "profile_costs.py"),
        ("--engines nanospec --synthetic-acceptance 1", "out of range"),
        ("--engines nanospec --limit 0", "1 or more"),
        ("--engines nanospec --data nowhere.jsonl", "cannot be read"),
    ],
)
def test_what_cannot_work_is_refused(
    command: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ab_vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_info:
        ab_vllm.main(command.split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_broken_vllm_raises_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")  # restored afterwards
    with pytest.raises(SystemExit, match="vLLM cannot be imported"):
        ab_engines.create_vllm(job(engine="vllm"))


def job(**changes: Any) -> Job:
    own = Job(
        engine="nanospec",
        model=TARGET,
        max_model_len=128,
        options=CPU,
        prompts=[[5, 6, 7], [8, 9, 10, 11]],
        max_tokens=24,
        loads=[(2, 2)],
    )
    return replace(own, **changes)


def test_vllm_gets_the_same_acceptance_and_graphs_of_all_rows() -> None:
    chain = {"draft": DRAFTER, "num_draft": 3, "synthetic_acceptance": 0.5}
    options = vllm_options(job(mode="adaptive", loads=[(8, 8), (256, 512)], **chain))
    own = options["speculative_config"]
    assert own["method"] == "dspark" and own["enable_adaptive_verification"] is True
    assert own["rejection_sample_method"] == "synthetic"
    assert own["synthetic_acceptance_rates"] == [0.5, 0.25, 0.125]
    sizes = options["compilation_config"]["cudagraph_capture_sizes"]
    assert options["max_num_seqs"] == 256 and sizes[-1] == 1024 and sizes == sorted(set(sizes))
    few = vllm_options(job(mode="spec", loads=[(8, 8)], **chain))
    assert "compilation_config" not in few  # its own graphs suffice
    assert "speculative_config" not in vllm_options(job(loads=[(300, 300)]))
    assert all(size % 6 == 0 for size in graph_sizes(1536, 6) if size > 512)


def test_a_confidence_head_says_the_coins_probability() -> None:
    import torch

    head = SimpleNamespace(proj=torch.nn.Linear(4, 1))
    drafter = SimpleNamespace(model=SimpleNamespace(confidence_head=head))
    speculator = SimpleNamespace(model=drafter)
    worker = SimpleNamespace(model_runner=SimpleNamespace(speculator=speculator))
    ab_engines._fix_confidence(worker, 0.85)
    said = torch.sigmoid(head.proj(torch.randn(3, 4)))
    torch.testing.assert_close(said, torch.full((3, 1), 0.85))


class Scripted:
    """Gives every request two tokens a step, until it has four."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.most = 0
        self.drained = False

    def start(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        self.running[index] = 0
        self.most = max(self.most, len(self.running))

    def step(self) -> list[Update]:
        for index in self.running:
            self.running[index] += 2
        found = [
            Update(index, [index, index], finish_reason="length" if count == 4 else None)
            for index, count in self.running.items()
        ]
        self.running = {index: count for index, count in self.running.items() if count < 4}
        return found

    def drain(self) -> None:
        self.drained = True


def test_the_driver_keeps_so_many_in_flight_and_notes_everything() -> None:
    engine = Scripted()
    records = drive(engine, [[1]] * 5, 4, 2)
    assert engine.most == 2 and engine.drained and len(records) == 5
    for index, record in enumerate(records):
        assert record["token_ids"] == [index] * 4 and record["num_tokens"] == 4
        assert [tokens for _, tokens in record["emissions"]] == [2, 2]
        assert record["admitted"] <= record["emissions"][0][0] <= record["emissions"][1][0]
        assert record["finish_reason"] == "length"


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_nanospec_says_what_generate_says(run_ahead: str) -> None:
    llm = LLM(speculator="none", **CPU)
    prompt = llm.encode_chat(QUESTION)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    (want,) = llm.generate([prompt], params)
    chain = job(
        mode="spec",
        draft=DRAFTER,
        prompts=[prompt, prompt],
        stop_ids=[2],
        options=CPU | {"run_ahead": run_ahead},
    )
    found = ab_engines.run(chain)
    records = found["runs"][0]["records"]
    assert [record["token_ids"] for record in records] == [want.outputs[0].token_ids] * 2
    assert found["version"] and records[0]["finish_reason"] == want.outputs[0].finish_reason
    assert records[0]["emissions"][0][1] == 1  # what ends the prompt
    assert len(records[0]["emissions"]) < 24


def test_synthetic_acceptance_is_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECULATORS, "synthetic", SPECULATORS["dspark"])
    own = job(
        mode="spec",
        draft=DRAFTER,
        num_draft=3,
        synthetic_acceptance=0.7,
        prompts=[[5, 6, 7]] * 24,
        max_tokens=60,
        loads=[(24, 24)],
    )
    records = ab_engines.run(own)["runs"][0]["records"]
    want = 1 + 0.7 + 0.7**2 + 0.7**3
    assert ab_report.acceptance_length(records) == pytest.approx(want, rel=0.08)
    assert {record["finish_reason"] for record in records} == {"length"}


def test_gaps_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ab_engines, "_FORKS", 2)
    llm = LLM(speculator="none", **CPU)
    prompt = llm.encode_chat(QUESTION)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=3))
    first, second, third = output.outputs[0].token_ids
    grown = [*prompt, first, second]
    forks = [(grown, third, 50), (prompt[:3], 52, 53), (grown, 51, 50), (grown, 52, 53)]
    forks.append((prompt[:1], 52, 53))
    one, short, other, *_, shortest = measure_gaps(job(forks=forks, dtype="float32"))
    assert short["behind"] >= short["between"] > 0
    assert max(short["noise"], shortest["noise"]) < 1e-3 * one["gap"]
    assert one["behind"] == one["between"] >= one["gap"] > 1e3 * one["noise"] > 0
    assert one["step"] == 2.0 ** (4 - 23)  # of a logit between 16 and 32
    assert other["behind"] >= other["between"]
    assert math.isclose(other["gap"], one["gap"], rel_tol=1e-6)


# Found against vLLM: 1.25 apart in bfloat16, 0.65 in float32, and all of three ways to compute the
# former within 0.25, as they rounded the keys before alike.
def test_noise_reaches_as_far_as_rounding_takes_logits_from_exact_ones() -> None:
    llm = LLM(speculator="none", **CPU)
    prompt = llm.encode_chat(QUESTION)
    forks = [(prompt, 52, 53), (prompt[:4], 60, 70)]
    exact, rounded = (measure_gaps(job(forks=forks, dtype=d)) for d in ("float32", "bfloat16"))
    for one, other in zip(exact, rounded, strict=True):
        assert other["noise"] > 100 * one["noise"]
        apart = abs(one["behind"] - other["behind"])
        assert 2 * other["noise"] + other["step"] >= apart > 0
        assert other["step"] == 2**16 * one["step"]
    asked = CPU | {"dtype": "bfloat16", "attention": "torch"}
    assert measure_gaps(job(forks=forks, dtype="float32", options=asked)) == rounded


def test_engines_take_turns_and_a_server_runs_once() -> None:
    command = "--engines nanospec,url --engine-url http://here --modes none,spec --repeats 2"
    args = ab_vllm.parse(command.split())
    order = [(own.engine, own.mode, own.seed) for own in ab_vllm.jobs(args, job(draft=DRAFTER))]
    turn = [("nanospec", "none"), ("url", "server"), ("nanospec", "spec")]
    assert order == [(*own, seed) for seed in (0, 1) for own in turn]
    drafts = [own.draft for own in ab_vllm.jobs(args, job(draft=DRAFTER))]
    assert drafts == [None, None, DRAFTER] * 2


def test_shapes_bring_random_prompts_and_no_stop(tmp_path: Path) -> None:
    command = "--engines nanospec --shapes qwen3-8b --synthetic-acceptance 0.85 --limit 9"
    args = ab_vllm.parse([*command.split(), "--concurrency", "1,4", "--prompts-per-slot", "2"])
    task = prepare(args, tmp_path)
    own = task.base
    assert task.problems is None and not own.has_tokenizer and own.load_format == "dummy"
    assert own.stop_ids == [] and [len(each) for each in own.prompts] == [128] * 9
    assert own.loads == [(1, 2), (4, 8)] and own.num_draft == 7
    config = json.loads((Path(own.model) / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["hidden_size"] == 4096


def costs(tmp_path: Path) -> str:
    """Write a cost table of the embedded pair."""
    setup, path = LLM(**CPU).engine.speculator, tmp_path / "costs.json"
    stated = about(setup.setup, type(setup).__name__, setup.effective.max_rows)
    CostTable(((1, 10.0), (64, 11.0)), ((1, 1.0),), 64, stated).save(path)
    return str(path)


@pytest.mark.parametrize("mode", ["none", "spec", "adaptive"])
def test_in_every_mode_there_are_rows_for_prompts_beside_all_drafts(
    mode: str, tmp_path: Path
) -> None:
    own = job(mode=mode, draft=None if mode == "none" else DRAFTER, cost_table=costs(tmp_path))
    engine = ab_engines.create_nanospec(own)._engine
    assert engine.scheduler.max_num_batched_tokens == own.most_rows + 2048
    assert own.most_rows == (2 if mode == "none" else 2 * 8)


@pytest.mark.parametrize("coins", [None, 0.8])
def test_adaptive_mode_takes_a_table_with_coins_or_without(
    coins: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECULATORS, "synthetic", SPECULATORS["dspark"])
    own = job(mode="adaptive", draft=DRAFTER, cost_table=costs(tmp_path))
    records = ab_engines.run(replace(own, synthetic_acceptance=coins))["runs"][0]["records"]
    assert [record["num_tokens"] for record in records] == [24, 24]
