"""What only a GPU can show: who waits for whom, and what 16-bit arithmetic leaves of equality."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanospec import LLM, SamplingParams
from nanospec.config import EMBEDDED_PAIR
from nanospec.engine import round as rounds
from nanospec.spec.budget import CostTable
from nanospec.spec.speculator import about
from nanospec.types import StepOutput
from tests import helpers

pytestmark = pytest.mark.gpu
PROBLEMS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "word_problems_heldout.jsonl")
    .read_text()
    .splitlines()
]
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


def pair(**options: Any) -> LLM:
    return LLM(device="cuda", kv_cache_gib=0.2, max_model_len=512, max_num_seqs=64, **options)


def prompts_of(llm: LLM, count: int) -> list[list[int]]:
    chats = ([{"role": "user", "content": own["question"]}] for own in PROBLEMS[:count])
    return [llm.encode_chat(chat) for chat in chats]


@pytest.mark.parametrize("adaptive", ["off", "schedule:[[1,99,3]]", "auto"])
@pytest.mark.parametrize("speculator", ["none", "dspark"])
def test_a_round_waits_once(tmp_path: Path, speculator: str, adaptive: str) -> None:
    if speculator == "none" and adaptive != "off":
        pytest.skip("nothing is drafted")
    options: dict[str, Any] = {"speculator": speculator, "adaptive": adaptive}
    if adaptive == "auto":
        setup = pair(speculator=speculator).engine.speculator
        rows = setup.effective.max_rows
        stated = about(setup.setup, type(setup).__name__, rows)
        CostTable(((1, 10.0), (64, 40.0)), ((1, 5.0),), 0, stated).save(tmp_path / "costs.json")
        options["cost_table"] = str(tmp_path / "costs.json")
    llm = pair(**options)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for prompt in prompts_of(llm, 8):
        engine.add(prompt, params)
    for _ in range(6):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(10):
            engine.step()
    counts = Counter(event.name for event in profile.events() if event.name in WAITS)
    counts.subtract({"cudaDeviceSynchronize": counts["cudaDeviceSynchronize"]})  # the profiler's
    # With a cost table the survivals of the round before are read too; they came long ago.
    assert sum(counts.values()) <= 10 * (2 if adaptive == "auto" else 1), counts
    assert engine.step_stats.steps >= 14


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Every round's logits [N, V], in the order in which rounds are launched."""
    seen: list[Tensor] = []
    accept = rounds.accept

    def recording(plan: Any, logits: Tensor, roots: Any, packed: Any) -> Any:
        seen.append(logits.float().cpu())
        return accept(plan, logits, roots, packed)

    monkeypatch.setattr(rounds, "accept", recording)
    yield seen


def logits_by_position(
    llm: LLM, prompts: list[list[int]], recorded: list[Tensor], max_tokens: int
) -> tuple[list[list[int]], list[dict[int, Tensor]]]:
    """Return outputs, and for each the logits [V] that its tokens were taken from."""
    recorded.clear()
    found: dict[int, dict[int, Tensor]] = {}
    steps = 0

    def observe(step: StepOutput) -> None:
        nonlocal steps
        logits, steps = recorded[steps], steps + 1
        starts = step.rows.offsets.tolist()
        for index, request in enumerate(step.requests):
            own = found.setdefault(request.request_id, {})
            first = request.num_output - len(step.emitted[index])
            for depth, row in enumerate(step.path[index][: len(step.emitted[index])]):
                own[first + depth] = logits[starts[index] + row]

    llm.engine.observers.append(observe)
    outputs = helpers.token_ids(llm, prompts, helpers.greedy(max_tokens, ignore_eos=False))
    return outputs, [found[index] for index in sorted(found)]


@pytest.mark.parametrize("model", ["pair", "smollm2"])
def test_speculation_parts_from_plain_decoding_at_near_ties_alone(
    recorded: list[Tensor], request: pytest.FixtureRequest, model: str
) -> None:
    """In bfloat16, from graphs. At the first difference the best two were as good as equal."""
    speculators = ["dspark", "dspark-tree"]
    options: dict[str, Any] = {"model": str(EMBEDDED_PAIR / "target")}
    options["draft"] = str(EMBEDDED_PAIR / "drafter")
    if model == "smollm2":
        options = {"model": str(request.getfixturevalue("smollm2"))}
        speculators = ["ngram", "trie"]
    plain = pair(**(options | {"draft": None, "speculator": "none"}))
    prompts = prompts_of(plain, 60)
    want, plain_logits = logits_by_position(plain, prompts, recorded, 60)
    del plain
    for speculator in speculators:
        llm = pair(**options, speculator=speculator)
        got, logits = logits_by_position(llm, prompts, recorded, 60)
        parted = 0
        for mine, theirs, own, plains in zip(got, want, logits, plain_logits, strict=True):
            at = next(
                (i for i, pair in enumerate(zip(mine, theirs, strict=False)) if len(set(pair)) > 1),
                None,
            )
            if at is None:
                assert len(mine) == len(theirs)
                continue
            parted += 1
            best, second = plains[at].topk(2).values.tolist()
            apart = float((plains[at] - own[at]).abs().max())
            assert best - second < 4 * apart, (model, speculator, at, best - second, apart)
        assert model != "pair" or parted <= len(prompts) / 10  # whose answers are sure
        print(f"{model}, {speculator}: {parted} of {len(prompts)} prompts part from plain decoding")
        del llm
