"""Costs are measured and loads simulated, on the embedded pair."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import profile_costs
import pytest
import simulate_load
from profile_costs import Bench, Shape, parse_loads, profile, sizes_beyond
from simulate_load import Outcome, Recorded, RecordedRound, Simulation, first_behind, policies

from nanospec import LLM, SamplingParams
from nanospec.attention.batch import ForwardBatch
from nanospec.cudagraph.buckets import pad_batch, tier_of
from nanospec.cudagraph.runner import ModelRunner, TargetOutput
from nanospec.errors import ConfigError
from nanospec.spec.adaptive import PROBE_REQUESTS, PROBE_ROUNDS, Costs, Policy
from nanospec.spec.budget import CostTable
from nanospec.trace import Tracer
from nanospec.types import PlanKind, Request, StepOutput

FLAT = CostTable(((1, 100.0),), ((1, 0.0),), 0, {})
STEEP = CostTable(((1, 1.0), (2, 100.0), (9, 5000.0)), ((1, 7.0),), 0, {})
GOOD, BAD = RecordedRound((0.9, 0.8), 3), RecordedRound((0.5, 0.1), 1)
RECORDED = Recorded([[GOOD, BAD] * 4, [BAD, GOOD] * 4])


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
    options: dict[str, Any] = {"device": "cpu", "kv_cache_gib": 0.1, "max_model_len": 512}
    llm = LLM(adaptive="auto", cost_table=str(path), **options)
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = [LLM(speculator="none", **options), llm]
    plain, adaptive = (each.generate("Tom has 3", params)[0].outputs[0].text for each in texts)
    assert plain == adaptive
    with pytest.raises(ConfigError, match="max_draft_len='7', this is '3'"):
        LLM(adaptive="auto", cost_table=str(path), max_draft_len=3, **options)


class PaddedRunner:
    """Pads to tiers as graphs do, and runs eagerly."""

    tiers = (1, 2, 4, 6, 12)

    def __init__(self, eager: ModelRunner, scratch_slot: int):
        self._eager, self._scratch_slot = eager, scratch_slot

    def buffers(self, num_rows: int, num_logits: int, max_rows: int) -> ForwardBatch | None:
        """See `ModelRunner.buffers`."""
        return None

    def run(self, batch: ForwardBatch) -> TargetOutput:
        """See `ModelRunner.run`."""
        tier = tier_of(batch.num_tokens, self.tiers)
        if tier is not None:
            batch = pad_batch(batch, tier, batch.num_reqs, self._scratch_slot)
        return self._eager.run(batch)


def bench(*, has_tiers: bool = False, max_num_seqs: int = 8, **options: Any) -> Bench:
    engine = LLM(
        device="cpu",
        kv_cache_gib=0.1,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=40,
        **options,
    ).engine
    if has_tiers:
        runner = PaddedRunner(engine._ctx.runner, engine._ctx.caches[0].scratch_slot)
        engine._ctx = replace(engine._ctx, runner=runner)
    return Bench(engine, context=9, rounds=1)


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_every_tier_is_timed_by_rounds_that_fill_it(run_ahead: str) -> None:
    own = bench(has_tiers=True, run_ahead=run_ahead)
    seen: set[tuple[int, int]] = set()
    own.engine.observers.append(lambda step: seen.add((step.num_tokens, step.tier)))
    table = profile(own, [1, 2, 4], [])
    assert [rows for rows, _ in table.verify] == [1, 2, 4, 6, 12, 18, 36, 39]
    assert table.largest_tier == 12 and [load for load, _ in table.draft] == [1, 2, 4]
    assert {(rows, rows) for rows, _ in table.verify} <= seen
    assert all(us > 0 for _, us in table.draft)
    assert not own.engine.has_work and own.engine.pages.num_free == own.engine.pages.num_pages


def test_rounds_of_a_size_come_from_several_loads_and_prompts_fill_what_these_cannot() -> None:
    own = bench(has_tiers=True)
    assert own.shapes(6, [1, 2, 4, 8]) == [Shape(1, 5), Shape(2, 4), Shape(4, 2)]
    assert own.shapes(36, [1, 2, 4]) == [Shape(1, 7, 28), Shape(2, 14, 20), Shape(4, 28, 4)]
    with pytest.raises(SystemExit, match="can fill 1 rows"):
        own.shapes(1, [2, 4])
    assert sizes_beyond(12, 40) == [18, 36, 40] and sizes_beyond(40, 40) == []
    assert parse_loads(None, 6) == [1, 2, 4, 6] and parse_loads("4,1", 4) == [1, 4]
    with pytest.raises(SystemExit, match="max-num-seqs"):
        parse_loads("1,9", 8)


def test_tiers_that_hold_prompts_are_left_out_where_nobody_can_bring_one() -> None:
    table = profile(bench(has_tiers=True, max_num_seqs=1), [1], [])
    assert [rows for rows, _ in table.verify] == [1, 2, 4, 6] and table.largest_tier == 6


def test_trees_are_timed_where_trees_are_verified() -> None:
    own = bench(speculator="dspark-tree", max_draft_len=4)
    kinds: list[tuple[PlanKind, int]] = []

    def observe(step: StepOutput) -> None:
        if step.num_tokens == 10:
            kinds.append((step.plan.kind, step.plan.num_masked))

    own.engine.observers.append(observe)
    assert own.round_us(Shape(2, 8)) > 0
    assert kinds and set(kinds) == {(PlanKind.TREE, 2)}


def trace_of(tmp_path: Path, *rounds: Sequence[dict[str, Any]]) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"requests": requests}) for requests in rounds))
    return path


def record(number: int, *fates: str, emitted: int, **changes: Any) -> dict[str, Any]:
    drafts = [
        {"row": row, "parent": row - 1, "fate": fate, "survival": 0.5**row} | changes
        for row, fate in enumerate(fates, start=1)
    ]
    end = "stop" if "cut" in fates else None
    return {"request": number, "drafts": drafts, "emitted": [{}] * emitted, "finish_reason": end}


def test_a_trace_is_read_as_the_history_of_each_request(tmp_path: Path) -> None:
    path = trace_of(
        tmp_path,
        [record(3, emitted=1), record(7, emitted=1)],
        [record(7, "accepted", "rejected", emitted=2), record(3, "rejected", emitted=1)],
        [record(7, "accepted", "cut", emitted=1), record(3, "accepted", "not verified", emitted=2)],
        [record(7, "cut", emitted=0), record(3, "accepted", "accepted", emitted=3)],
        [record(7, emitted=1), record(3, emitted=1)],  # another 7, from another run
    )
    recorded = Recorded.read(path)
    three = [RecordedRound((0.5,), 1), RecordedRound((0.5, 0.25), 3), RecordedRound((), 1)]
    seven = [RecordedRound((0.5, 0.25), 2), RecordedRound((0.5, 0.25), 1)]
    assert recorded == Recorded([three, seven], num_left_out=1) and recorded.width == 2


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    tree = record(0, "accepted", "rejected", emitted=2, parent=0)
    with pytest.raises(SystemExit, match="no chain"):
        Recorded.read(trace_of(tmp_path, [record(0, emitted=1)], [tree]))
    with pytest.raises(SystemExit, match="without survivals"):
        Recorded.read(trace_of(tmp_path, [record(0, "accepted", emitted=2, survival=None)]))
    with pytest.raises(SystemExit, match="holds no round"):
        Recorded.read(trace_of(tmp_path, [record(0, emitted=1)], [record(0, emitted=1)]))


def test_a_trace_is_replayed_against_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(device="cpu", kv_cache_gib=0.1, max_model_len=512)
    with (tmp_path / "trace.jsonl").open("w") as out:
        llm.engine.observers.append(Tracer(out, llm.tokenizer, as_data=True))
        params = SamplingParams(temperature=0, max_tokens=30)
        outputs = llm.generate(["Tom has 3", "There are 12"], params)
    FLAT.save(tmp_path / "costs.json")
    command = f"--trace {tmp_path}/trace.jsonl --cost-table {tmp_path}/costs.json --requests 1,8"
    simulate_load.main([*command.split(), "--rounds", "5"])
    found = last_json(capsys)
    speeds = found["tokens_per_second"]
    assert isinstance(speeds, dict) and set(speeds) == {"none", "adaptive"} | {
        f"K={length}" for length in range(1, 8)
    }
    recorded = Recorded.read(tmp_path / "trace.jsonl")
    assert recorded.width == 7
    for rounds, output in zip(recorded.requests, outputs, strict=True):
        tokens = len(output.outputs[0].token_ids)  # the first came with the prompt's end
        assert 1 + sum(each.num_emitted for each in rounds) == tokens


def test_simulated_rounds_are_counted_by_hand() -> None:
    named = policies(FLAT, 2)

    def simulate(name: str, load: int) -> Outcome:
        return simulate_load.simulate(RECORDED, FLAT, named[name](), load, 54, seed=0)

    assert simulate("none", 4) == Outcome(pytest.approx(4 / 100e-6), 0, 0)
    # Of nine rounds of a request one is its prompt's, four give three tokens.
    whole = simulate("K=2", 400)
    assert whole.verified == pytest.approx(2 * 8 / 9, rel=0.02) and whole.drafting == 1
    assert whole.tokens_per_second == pytest.approx(400 * 17 / 9 / 100e-6, rel=0.02)
    assert simulate("adaptive", 400) == whole


class Watched(Policy):
    """Sees what each request is asked about."""

    def __init__(self) -> None:
        self.seen: dict[Request, list[list[float]]] = {}

    def admit(self, requests: Sequence[Request], *args: Any) -> Any:
        """See `Policy.admit`."""
        for request in requests:
            own = self.seen.setdefault(request, [])
            if request.draft is not None:
                own.append([round(float(each), 3) for each in request.draft.survival or []])
        return super().admit(requests, *args)


def test_a_simulated_request_has_a_history_of_its_own() -> None:
    long = [RecordedRound((round(0.9 - place / 100, 3),), 1) for place in range(20)]
    policy = Watched()
    simulation = Simulation(Recorded([long]), FLAT, policy, seed=0)
    assert all(simulation.step(3).tokens == 3 for _ in range(50))
    whole = [list(each.survival) for each in long]
    assert len(policy.seen) > 6 and sum(own == whole for own in policy.seen.values()) >= 3
    for request, own in policy.seen.items():
        start = whole.index(own[0]) if own else 0
        assert own == whole[start : start + len(own)]
        assert request.is_finished or len(own) < 20


def test_drafting_is_charged_while_it_goes_on_and_only_then() -> None:
    simulation = Simulation(Recorded([[GOOD] * 500]), STEEP, Costs(STEEP), seed=0)
    done = [simulation.step(4) for _ in range(2 * PROBE_ROUNDS)]
    drafted = [each.drafted > 0 for each in done]
    assert drafted[:3] == [False, True, False]  # all are new; nothing pays; nothing is made
    assert 2 <= sum(drafted) <= 5  # probes
    plain = float(STEEP.verify_us(np.array([4]))[0])
    assert {each.verified for each in done} == {0}
    assert {each.micros for each in done if not each.drafted} == {plain}
    assert {each.micros for each in done if each.drafted} == {plain + 7.0}


def test_speculation_comes_back_when_the_load_falls() -> None:
    # Sixteen rows cost the same, each one more costs dearly.
    table = CostTable(((16, 10.0), (17, 1e3), (999, 1e6)), ((1, 0.0),), 16, {})
    simulation = Simulation(Recorded([[GOOD] * 500, [BAD] * 500]), table, Costs(table), seed=0)
    high = [simulation.step(64) for _ in range(40)]
    assert {each.verified for each in high} == {0} and sum(each.drafted > 0 for each in high) < 5
    low = [simulation.step(8) for _ in range(10)]
    assert low[0].drafted and {each.verified for each in low[1:]} == {8}
    assert sum(each.tokens for each in low) > 1.2 * 80


def outcomes(*speeds: float) -> list[Outcome]:
    return [Outcome(speed, 0.0, 0.0) for speed in speeds]


def test_the_crossover_is_where_a_policy_stays_behind() -> None:
    none, own = outcomes(1.0, 1.0, 1.0, 1.0), outcomes(2.0, 0.5, 1.5, 0.9)
    assert first_behind(own, none, [1, 2, 4, 8]) == 8
    assert first_behind(none, none, [1, 2, 4, 8]) is None


def test_a_probe_of_some_requests_is_charged_for_these_alone() -> None:
    table = CostTable(((64, 100.0), (999, 1e6)), ((1, 1.0), (64, 64.0)), 64, {})
    simulation = Simulation(Recorded([[BAD] * 500]), table, Costs(table), seed=0)
    done = [simulation.step(64) for _ in range(8 * PROBE_ROUNDS)]
    probes = [each for each in done[3:] if each.drafted]
    assert {each.drafted for each in probes} == {PROBE_REQUESTS} and len(probes) >= 4
    assert {each.micros for each in probes} == {100.0 + PROBE_REQUESTS}
