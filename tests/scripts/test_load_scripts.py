"""Costs are measured and loads simulated, on the embedded pair."""

import json
from pathlib import Path

import numpy as np
import profile_costs
import pytest
import simulate_load
from simulate_load import Recorded, first_behind, policies, simulate

from nanospec import LLM, SamplingParams
from nanospec.spec.budget import CostTable
from nanospec.trace import Tracer

FLAT = CostTable(((1, 100.0),), ((1, 0.0),), 0, {})
STEEP = CostTable(((1, 1.0), (2, 100.0), (9, 5000.0)), ((1, 0.0),), 0, {})
RECORDED = Recorded(np.array([[0.9, 0.8], [0.5, 0.1]]), np.array([2, 0]))


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_measured_costs_serve_adaptive_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    command = f"--device cpu --requests 1,2 --drafts 0,3 --context 9 --rounds 2 --out {path}"
    profile_costs.main(command.split())
    measured = last_json(capsys)
    stored = json.loads(path.read_text())
    assert [rows for rows, _ in stored["verify"]] == [1, 2, 4, 8]
    assert stored["draft"] == measured["draft"] and len(stored["draft"]) == 2
    options = {"device": "cpu", "kv_cache_gib": 0.1, "max_model_len": 512}
    llm = LLM(adaptive="auto", cost_table=str(path), **options)
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = [LLM(speculator="none", **options), llm]
    plain, adaptive = (each.generate("Tom has 3", params)[0].outputs[0].text for each in texts)
    assert plain == adaptive


def test_a_trace_is_replayed_against_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(device="cpu", kv_cache_gib=0.1, max_model_len=512)
    with (tmp_path / "trace.jsonl").open("w") as out:
        llm.engine.observers.append(Tracer(out, llm.tokenizer, as_data=True))
        llm.generate(["Tom has 3", "There are 12"], SamplingParams(temperature=0, max_tokens=30))
    FLAT.save(tmp_path / "costs.json")
    command = f"--trace {tmp_path}/trace.jsonl --cost-table {tmp_path}/costs.json --requests 1,8"
    simulate_load.main([*command.split(), "--rounds", "5"])
    found = last_json(capsys)
    speeds = found["tokens_per_second"]
    assert isinstance(speeds, dict) and set(speeds) == {"none", "adaptive"} | {
        f"K={length}" for length in range(1, 8)
    }
    recorded = Recorded.read(tmp_path / "trace.jsonl")
    assert recorded.survival.shape[1] == 7 and recorded.accepted.max() <= 7


def test_simulated_rounds_are_counted_by_hand() -> None:
    named = policies(FLAT, 2)
    speed, verified = simulate(RECORDED, FLAT, named["none"], 4, 50, seed=0)
    assert speed == pytest.approx(4 / 100e-6) and verified == 0
    speed, verified = simulate(RECORDED, FLAT, named["K=2"], 400, 50, seed=0)
    assert verified == 2 and speed == pytest.approx(400 * 2 / 100e-6, rel=0.05)  # half accept 2
    whole = simulate(RECORDED, FLAT, named["adaptive"], 4, 50, seed=0)
    assert whole == simulate(RECORDED, FLAT, named["K=2"], 4, 50, seed=0)
    steep = policies(STEEP, 2)["adaptive"]
    assert simulate(RECORDED, STEEP, steep, 4, 50, seed=0)[1] == 0


def test_the_crossover_is_where_a_policy_stays_behind() -> None:
    none, own = [(1.0, 0.0)] * 4, [(2.0, 1.0), (0.5, 1.0), (1.5, 1.0), (0.9, 1.0)]
    assert first_behind(own, none, [1, 2, 4, 8]) == 8
    assert first_behind(none, none, [1, 2, 4, 8]) is None
