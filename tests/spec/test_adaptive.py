"""Policies: how many drafts are verified, and that nobody else's output knows of it."""

import json
import random
from collections import Counter, deque
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanospec import LLM
from nanospec.attention.torch_backend import TorchAttention
from nanospec.config import EngineConfig, parse_adaptive
from nanospec.engine.engine import Engine
from nanospec.errors import ConfigError
from nanospec.spec import adaptive as adaptive_module
from nanospec.spec import speculator as speculators
from nanospec.spec.adaptive import (
    DOUBTS,
    MOST_PROBE_ROUNDS,
    PROBE_REQUESTS,
    PROBE_ROUNDS,
    Costs,
    Policy,
    Schedule,
    Threshold,
    Verdict,
    create_policy,
    share_out,
)
from nanospec.spec.budget import CostTable
from nanospec.spec.estimator import AcceptanceEstimator
from nanospec.types import (
    Budget,
    Capability,
    Draft,
    DraftRows,
    EngineView,
    PlanKind,
    Request,
    StepOutput,
    as_list,
)
from tests import helpers

PROMPTS = [*helpers.random_prompts(5, seed=3), [*range(5, 15)] * 3]
STEEP = CostTable(((1, 1.0), (2, 1e3), (200, 1e6)), ((1, 1e3),), 0, {})
FLAT = CostTable(((1, 100.0),), ((1, 1.0),), 0, {})


def view(num_running: int) -> EngineView:
    return EngineView(num_running, 0, 100, 16)


def requests_with(*survivals: list[float]) -> list[Any]:
    return [
        helpers.make_request(
            [1, 2],
            draft=Draft([7] * len(own), survival=own) if own else None,
            max_drafts=len(own),
        )
        for own in survivals
    ]


def counts(policy: Policy, requests: list[Any], other: int = 0, room: int = 10_000) -> list[int]:
    policy.admit(requests, other or len(requests), room)
    return [request.max_drafts for request in requests]


def test_where_rows_are_short_they_go_to_those_who_use_them() -> None:
    def requests() -> list[Any]:
        return requests_with([0.5, 0.4, 0.3], [0.9, 0.8, 0.7], [0.6, 0.2, 0.1])

    assert counts(Policy(), requests(), room=5) == [2, 2, 1]  # dealt out evenly
    assert counts(Schedule([(1, 4, 3)]), requests(), room=5) == [1, 3, 1]
    assert counts(Threshold(0.4), requests(), room=4) == [0, 3, 1]
    assert counts(Costs(FLAT), requests(), room=5) == [1, 3, 1]
    assert counts(Policy(), requests(), room=0) == [0, 0, 0]


def test_a_passing_prompt_or_a_minority_stops_no_drafting() -> None:
    # Tiers of 4, 8 and 16 rows.
    policy = Costs(CostTable(((4, 10.0), (8, 10.0), (16, 20.0)), ((1, 0.0),), 16, {}))
    requests = requests_with(*[[0.5, 0.25]] * 4)
    assert sum(counts(policy, requests)) > 0
    for request in requests:
        request.max_drafts = 2
    assert counts(policy, requests, other=8) == [0] * 4  # a chunk of 4 rows fills the tier
    assert policy.candidate_budget(view(4), 7).max_rows_per_request == 8
    dear = Costs(CostTable(((4, 10.0), (8, 40.0), (16, 80.0)), ((1, 5.0),), 16, {}))
    one = requests_with([0.01], [], [], [])
    counts(dear, one)  # nothing is known of it
    one[0].max_drafts = 1
    assert counts(dear, one) == [0] * 4
    assert dear.candidate_budget(view(4), 7).max_rows_per_request == 8


# Found against vLLM: one place that is hard to guess stopped a lone request's drafts for 32 rounds.
def test_few_requests_go_on_drafting_behind_places_that_are_hard_to_guess() -> None:
    def run(policy: Costs, requests: list[Any], own: list[float]) -> int:
        for request in requests:
            request.draft, request.max_drafts = Draft([7] * len(own), survival=own), len(own)
        return sum(counts(policy, requests))

    def goes_on(policy: Costs, num_requests: int) -> bool:
        return policy.candidate_budget(view(num_requests), 7).max_rows_per_request > 1

    good, bad = [0.9, 0.8], [0.05, 0.01]
    dear = CostTable(((1, 10.0), (200, 210.0)), ((1, 5.0),), 0, {})
    policy, one = Costs(dear), requests_with(good)
    assert run(policy, one, good) > 0
    for _ in range(10):
        assert run(policy, one, bad) > 0  # by the round before
        assert run(policy, one, good) == 0 and goes_on(policy, 1)
    run(policy, one, bad)
    for index in range(DOUBTS):
        assert goes_on(policy, 1), index
        assert run(policy, one, bad) == 0
    assert not goes_on(policy, 1)
    many = requests_with(*[good] * DOUBTS)
    policy = Costs(dear)
    run(policy, many, bad)
    assert run(policy, many, bad) == 0 and not goes_on(policy, DOUBTS)


def test_a_probe_verifies_a_draft_of_each_only_where_that_teaches_something() -> None:
    for learns, want in ((True, [1, 1, 1]), (False, [0, 0, 0])):
        policy = Costs(STEEP, learns=learns)
        survivals = [[0.9, 0.8, 0.7], [0.1, 0.05], [0.2]]
        assert counts(policy, requests_with(*survivals)) == [0] * 3
        for _ in range(PROBE_ROUNDS):
            policy.candidate_budget(view(3), 7)
        assert counts(policy, requests_with(*survivals)) == want
        assert policy.candidate_budget(view(3), 7).max_rows_per_request == 8  # it is heard


def test_the_prediction_counts_drafting_while_it_goes_on() -> None:
    policy = Costs(CostTable(((1, 10.0),), ((1, 500.0),), 0, {}))
    plain = requests_with([], [])
    assert policy.admit(plain, 2, 100).predicted_us == 510.0  # the next drafts are made
    steep = Costs(STEEP)
    steep.admit(requests_with([0.9], [0.9]), 2, 100)
    assert steep.admit(plain, 2, 100).predicted_us == 1000.0


def test_counts_of_drafts_on_a_device_stay_there() -> None:
    rows = DraftRows(torch.zeros(3, 4, dtype=torch.int64), None, torch.tensor([[0.9] * 4] * 3))
    drafts = rows.drafts([4, 2, 3])
    requests = requests_with([], [], [])
    for request, draft in zip(requests, drafts, strict=True):
        request.draft, request.max_drafts = draft, len(draft)
    verdict = Schedule([(1, 4, 2)]).admit(requests, 3, 100)
    assert verdict.counts is not None and verdict.counts.tolist() == [2, 2, 2]
    assert verdict.total == 6 and [request.max_drafts for request in requests] == [4, 2, 3]


def test_off_verifies_everything() -> None:
    assert counts(Policy(), requests_with([0.9, 0.1], [], [0.5])) == [2, 0, 1]


@pytest.mark.parametrize(("room", "want"), [(4, [2, 1, 1]), (3, [1, 1, 1]), (1, [1, 0, 0])])
def test_off_verifies_no_more_than_there_is_room_for(room: int, want: list[int]) -> None:
    requests = requests_with([0.9, 0.1], [0.5], [0.5])
    assert counts(Policy(), requests, room=room) == want


def test_a_schedule_shares_its_pool_out_by_survival() -> None:
    policy = Schedule([(1, 4, 2)])
    assert counts(policy, requests_with([0.9, 0.8, 0.7], [0.75, 0.1, 0.1], [0.6, 0.5])) == [3, 1, 2]
    assert counts(policy, requests_with([0.9] * 7)) == [2]
    assert policy.candidate_budget(view(3), 7).max_rows_per_request == 8
    assert policy.candidate_budget(view(5), 7).max_rows_per_request == 1  # none beyond its rows


def test_a_threshold_cuts_where_survival_falls_below() -> None:
    found = counts(Threshold(0.5), requests_with([0.9, 0.5, 0.49], [0.4, 0.3], [], [0.7]))
    assert found == [2, 0, 0, 1]


def test_the_budget_comes_from_an_earlier_round_and_its_split_from_this_one() -> None:
    # Eight rows cost the same, more cost dearly: at most 5 drafts beside 3 roots, if they survive.
    table = CostTable(((8, 10.0), (9, 100.0), (30, 1000.0)), ((1, 0.0),), 8, {})
    policy = Costs(table)
    requests = requests_with([0.1] * 4, [0.2] * 4, [0.3] * 4)
    assert sum(counts(policy, requests)) == 5  # unknown requests count as sure
    for request in requests:
        request.draft, request.max_drafts = Draft([7] * 4, survival=[0.9, 0.8, 0.7, 0.6]), 4
    assert counts(policy, requests) == [2, 2, 1]
    dear = Costs(CostTable(((3, 10.0), (4, 14.0), (30, 118.0)), ((1, 0.0),), 0, {}))
    assert sum(counts(dear, requests_with([0.9] * 4, [0.9] * 4, [0.9] * 4))) == 0
    low, high = requests_with([0.01] * 4), requests_with([0.99] * 4)
    gentle = Costs(CostTable(((1, 10.0), (30, 155.0)), ((1, 0.0),), 0, {}))
    assert counts(gentle, low) == [4]  # nothing was known of it
    low[0].draft, low[0].max_drafts = high[0].draft, 4
    assert counts(gentle, low) == [0]  # what was known then was bad
    low[0].max_drafts = 4
    gentle.candidate_budget(view(1), 4)
    assert counts(gentle, low) == [4]  # what is known now is good


def test_the_example_of_the_paper_is_decided_by_the_round_before() -> None:
    """DSpark paper, appendix A: the second draft's confidence must not decide on the first draft.

    Rounds per second 1, 0.5, 0.45 with 0, 1, 2 drafts; the first survives with 0.8. With 0.9 for
    the second, 2 drafts are best, with 0 none are; and that 0.9 or 0 depends on the first's token.
    """
    table = CostTable(((1, 1.0), (2, 1 / 0.5), (3, 1 / 0.45)), ((1, 0.0),), 3, {})
    good, bad = [0.8, 0.8 * 0.9], [0.8, 0.0]
    for earlier, verified in ((good, 2), (bad, 0)):
        for now in (good, bad):
            policy = Costs(table)
            (request,) = requests_with(earlier)
            counts(policy, [request])  # what it says of itself counts from the next round on
            request.draft, request.max_drafts = Draft([7] * 2, survival=now), 2
            assert counts(policy, [request]) == [verified]


def test_nobody_is_judged_by_what_another_one_said_before() -> None:
    gentle = CostTable(((1, 10.0), (30, 155.0)), ((1, 0.0),), 0, {})
    low, high = [0.01] * 4, [0.99] * 4
    for order in ((low, high), (high, low)):
        policy = Costs(gentle)
        first, second = requests_with(*order)
        assert counts(policy, [first, second]) == [4, 4]  # nothing was known of them
        for request, own in ((second, order[1]), (first, order[0])):  # now each is alone
            request.max_drafts = 4
            assert counts(policy, [request]) == [4 if own is high else 0]
            policy.candidate_budget(view(2), 4)
        (new,) = requests_with(low)
        assert counts(policy, [new]) == [4]  # at the first one's place, and not known yet
        assert counts(policy, [new]) == [0]


def test_no_drafts_are_made_while_none_pay_and_some_again_when_the_load_changes() -> None:
    policy = Costs(STEEP, learns=True)
    assert policy.candidate_budget(view(4), 7).max_rows_per_request == 8
    assert counts(policy, requests_with(*[[0.9] * 7] * 4)) == [0] * 4
    waits = [policy.candidate_budget(view(4), 7).max_rows_per_request for _ in range(PROBE_ROUNDS)]
    assert waits == [1] * (PROBE_ROUNDS - 1) + [8]  # tries again by itself
    probe = requests_with(*[[0.9] * 7] * 4)
    assert sum(counts(policy, probe)) == 4  # a probe verifies, or nothing could be learnt from it
    assert policy.candidate_budget(view(4), 7).max_rows_per_request == 8  # and is heard at once
    assert counts(policy, probe) == [0] * 4
    assert policy.candidate_budget(view(4), 7).max_rows_per_request == 1
    assert policy.candidate_budget(view(3), 7).max_rows_per_request == 8  # or when some are done


@pytest.mark.parametrize("promise", [0.05, 0.9])
def test_a_probe_drafts_for_some_until_their_promise_is_known_and_stands_for_all(
    promise: float,
) -> None:
    """For 64 requests verifying 3 drafts each pays, if they hold; drafting costs half a round."""
    table = CostTable(((64, 100.0), (256, 180.0), (1024, 700.0)), ((1, 5.0), (64, 50.0)), 0, {})
    policy = Costs(table)
    requests = requests_with(*[[0.01] * 3] * 64)
    assert sum(counts(policy, requests)) > 0  # nothing is known of them
    for request in requests:
        request.max_drafts = 3
    assert counts(policy, requests) == [0] * 64
    found = [policy.candidate_budget(view(64 + i), 3) for i in range(PROBE_ROUNDS)]
    assert [each.total_drafts for each in found[:-1]] == [0] * (
        PROBE_ROUNDS - 1
    )  # a rise is no news
    sample = Budget(3 * PROBE_REQUESTS, 4, max_requests=PROBE_REQUESTS)
    assert found[-1] == sample
    for index, request in enumerate(requests):
        request.draft = Draft([7] * 3, survival=[promise] * 3) if index % 4 == 0 else None
        request.max_drafts = 3 if index % 4 == 0 else 0
    counts(policy, requests)  # what the drafts promise is on its way
    assert policy.candidate_budget(view(64), 3) == sample
    for request in requests[::4]:
        request.max_drafts = 3
    counts(policy, requests)
    if promise < 0.5:
        assert policy.candidate_budget(view(64), 3) == Budget(0, 1)
        return
    for _ in range(3):  # and it goes on, whatever was known of the others before
        assert policy.candidate_budget(view(64), 3) == Budget(64 * 3, 4)
        for request in requests:
            request.draft, request.max_drafts = Draft([7] * 3, survival=[promise] * 3), 3
        assert sum(counts(policy, requests)) > 100


# Found in review: a request of which nothing was known counted as sure, and ended the probe.
def test_a_probe_whose_requests_leave_goes_on_until_one_that_it_knows_drafts_again() -> None:
    table = CostTable(((64, 100.0), (256, 180.0), (1024, 700.0)), ((1, 5.0), (64, 50.0)), 0, {})
    policy, rng = Costs(table), random.Random(0)
    live = requests_with(*[[0.01] * 3] * 64)
    drafted = []
    for _ in range(40 * PROBE_ROUNDS):
        if rng.random() < 0.5:  # one ends, another comes
            live.pop(rng.randrange(64))
            live += requests_with([0.01] * 3)
        budget = policy.candidate_budget(view(64), 3)
        most = 64 if budget.max_requests is None else budget.max_requests
        places = {index * 64 // most for index in range(most)} if budget.total_drafts else set()
        for index, request in enumerate(live):
            request.max_drafts = 3 if index in places else 0
            request.draft = Draft([7] * 3, survival=[0.01] * 3) if index in places else None
        counts(policy, live)
        drafted.append(len(places))
    assert drafted.count(64) < 5 and drafted.count(PROBE_REQUESTS) > 8


def run_rounds(policy: Policy, own: list[Any], promise: float, num_rounds: int) -> list[bool]:
    """Return, of each of some rounds, whether drafts were made, all of which promise so much."""
    found = []
    for _ in range(num_rounds):
        found.append(policy.candidate_budget(view(len(own)), 7).total_drafts > 0)
        for request in own:
            request.draft = Draft([7] * 7, survival=[promise] * 7) if found[-1] else None
            request.max_drafts = 7 if found[-1] else 0
        policy.admit(own, len(own), 100)
    return found


def waits(found: list[bool]) -> list[int]:
    """Return how many rounds went by without drafts, each time that some did."""
    return [len(list(run)) + 1 for is_on, run in groupby(found) if not is_on]


PAYS_IF_LIKELY = CostTable(((4, 100.0), (32, 150.0), (999, 1e4)), ((1, 1.0),), 0, {})


@pytest.mark.parametrize("learns", [True, False])
def test_each_probe_in_vain_doubles_the_wait_for_the_next_until_drafts_pay_again(
    learns: bool,
) -> None:
    policy, own = Costs(PAYS_IF_LIKELY, learns=learns), requests_with(*[[]] * 4)
    want = [PROBE_ROUNDS, 64, 128, MOST_PROBE_ROUNDS, MOST_PROBE_ROUNDS]
    assert waits(run_rounds(policy, own, 0.01, 800))[:5] == want
    assert len(waits(run_rounds(policy, own, 0.9, 2 * MOST_PROBE_ROUNDS))) == 1
    assert all(run_rounds(policy, own, 0.9, 300))
    assert waits(run_rounds(policy, own, 0.01, 150))[:2] == [PROBE_ROUNDS, 64]


@pytest.mark.parametrize("learns", [True, False])
def test_a_probe_as_fewer_requests_run_is_never_put_off_and_counts_when_in_vain(
    learns: bool,
) -> None:
    policy, own = Costs(PAYS_IF_LIKELY, learns=learns), requests_with(*[[]] * 6)
    assert waits(run_rounds(policy, own, 0.01, 400))[:3] == [PROBE_ROUNDS, 64, 128]
    assert not run_rounds(policy, own, 0.01, 1)[0]
    assert run_rounds(policy, own[1:], 0.01, 1)[0]  # a sixth fewer: news
    assert waits(run_rounds(policy, own[1:], 0.01, 600))[0] == MOST_PROBE_ROUNDS


def test_a_later_row_never_brings_an_earlier_one_in() -> None:
    """A sampled tree in the order of its draws; row 4 hangs below row 3 and may know its token."""

    def verified(last: float) -> list[int]:
        tree, other = requests_with([0.9, 0.1, 0.5, last], [0.4, 0.3])
        tree.draft = Draft([7] * 4, [0, 1, 0, 3], survival=[0.9, 0.1, 0.5, last])
        share_out([tree, other], 3)
        return [tree.max_drafts, other.max_drafts]

    assert verified(0.45) == verified(0.01)


def test_an_estimator_sees_the_chain_that_a_tree_was_lowered_to(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Capability(PlanKind.CHAIN, 64, takes_device_counts=False, reason="chains only")
    monkeypatch.setattr(TorchAttention, "capability", lambda *_: kind)
    llm = helpers.make_llm(qwen3, speculator="trie", adaptive="threshold:0.1")
    estimator = llm.engine.speculator.estimator
    assert estimator is not None
    complete, seen = estimator.complete, []

    def recorded(requests: Any, drafts: Any) -> Any:
        seen.extend(draft for draft in drafts if draft is not None)
        return complete(requests, drafts)

    monkeypatch.setattr(estimator, "complete", recorded)
    assert helpers.token_ids(llm, PROMPTS, helpers.greedy(24)) == run(qwen3)[0]
    assert seen and all(draft.parents is None for draft in seen)


def table_for(llm: LLM, path: Path, table: CostTable, monkeypatch: pytest.MonkeyPatch) -> Path:
    about = speculators.about(llm.engine.speculator.setup, "x")
    about = {name: about[name] for name in ("model", "device", "dtype")}
    monkeypatch.setattr(speculators, "about", lambda *_: about)
    CostTable(table.verify, table.draft, table.largest_tier, about).save(path)
    return path


def run(folder: Path, **options: Any) -> tuple[list[list[int]], LLM]:
    llm = helpers.make_llm(folder, **options)
    return helpers.token_ids(llm, PROMPTS, helpers.greedy(24)), llm


@pytest.mark.parametrize("speculator", ["ngram", "trie", "draft", "dspark", "dspark-tree"])
def test_a_steep_table_means_plain_decoding_and_a_flat_one_verifies_all(
    qwen3: Path, tmp_path: Path, speculator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"speculator": speculator}
    if speculator == "draft":
        options["draft"] = str(qwen3)
    elif "dspark" in speculator:
        options["draft"] = str(helpers.make_drafter(tmp_path / "drafter", qwen3))
    want, plain = run(qwen3)
    steep = table_for(plain, tmp_path / "steep.json", STEEP, monkeypatch)
    got, llm = run(qwen3, adaptive="auto", cost_table=str(steep), **options)
    assert got == want and llm.stats.verified == 0
    flat = table_for(plain, tmp_path / "flat.json", FLAT, monkeypatch)
    got, llm = run(qwen3, adaptive="auto", cost_table=str(flat), **options)
    assert got == want and llm.stats.verified > 0
    _, off = run(qwen3, **options)
    assert llm.stats.verified == off.stats.verified


def test_a_steep_table_means_plain_decoding_past_every_probe(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = helpers.make_drafter(tmp_path / "drafter", qwen3)
    steep = table_for(run(qwen3)[1], tmp_path / "steep.json", STEEP, monkeypatch)
    llm = helpers.make_llm(
        qwen3, draft=str(drafter), adaptive="auto", cost_table=str(steep), max_num_seqs=3
    )
    params = helpers.greedy(2 * PROBE_ROUNDS + 10)
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    assert helpers.token_ids(llm, PROMPTS, params) == want
    assert llm.stats.verified == 0 < llm.stats.drafted < llm.stats.rounds


@pytest.mark.parametrize("speculator", ["dspark", "dspark-tree", "draft"])
def test_a_schedule_verifies_n_times_k_drafts_at_every_step(
    qwen3: Path, tmp_path: Path, speculator: str
) -> None:
    draft = qwen3
    if speculator != "draft":
        draft = helpers.make_drafter(tmp_path / "drafter", qwen3)
    llm = helpers.make_llm(
        qwen3, speculator=speculator, draft=str(draft), adaptive="schedule:[[1,3,4],[4,9,2]]"
    )
    seen: list[int] = []

    def observe(step: StepOutput) -> None:
        count = len(step.requests)
        drafts = [len(draft) for draft in step.drafts if draft is not None]
        verified = int(step.plan.num_rows.sum()) - count
        assert verified == min(len(drafts) * (4 if count <= 3 else 2), sum(drafts))
        seen.append(count)

    llm.engine.observers.append(observe)
    params = [helpers.greedy(length) for length in (8, 14, 20, 26, 32, 40)]
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    assert helpers.token_ids(llm, PROMPTS, params) == want
    assert set(seen) >= {1, 6}


Rank = tuple[float, int, int, int]  # survival, falling; depth; request; place


def ranks(request: Request, requests: Sequence[Request]) -> list[Rank]:
    """Return where each draft that a round could verify stands among those of all requests."""
    found: list[Rank] = []
    least, deepest = 1.0, 0
    for place, alive in enumerate(survivals(request)):
        assert request.draft is not None
        least, deepest = min(least, alive), max(deepest, request.draft.depths[place])
        found.append((-least, deepest, requests.index(request), place))
    return found


def survivals(request: Request) -> list[float]:
    """Return those of the drafts that a round could verify, in the precision that decides."""
    if request.num_planned == 0:
        return []
    assert request.draft is not None and request.draft.survival is not None
    alive = torch.as_tensor(request.draft.survival, dtype=torch.float32)
    found: list[float] = alive[: request.num_planned].tolist()
    return found


class Recount:
    """Works out by brute force what each round should verify of each request, and compares.

    What is known of a request is kept by the request, so whoever takes one for another is caught.
    """

    def __init__(self, engine: Engine, adaptive: str, table: CostTable):
        self.verified: Counter[Request] = Counter()
        self._kind, self._value = parse_adaptive(adaptive, 7)
        self._table = table  # in which drafting costs nothing
        self._known: dict[Request, list[float]] = {}  # survivals of an earlier round
        self._rounds: deque[tuple[list[Rank], int]] = deque()  # not settled: ranking, budget
        self._admit = engine.speculator.admit
        engine.speculator.admit = self._expect  # type: ignore[method-assign]
        engine.observers.append(self._compare)

    def _expect(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """Stands before `Speculator.admit`."""
        ranking = sorted(rank for request in requests for rank in ranks(request, requests))
        budget = self._budget(requests, ranking, num_other_rows)
        self._rounds.append((ranking, min(budget, len(ranking), room)))
        for request in requests:
            if request.num_planned > 0:
                self._known[request] = survivals(request)
        return self._admit(requests, num_other_rows, room)

    def _budget(
        self, requests: Sequence[Request], ranking: Sequence[Rank], num_other_rows: int
    ) -> int:
        if self._kind == "schedule":
            ((_, _, mean),) = self._value
            return mean * sum(request.num_planned > 0 for request in requests)
        if self._kind == "threshold":
            return sum(-rank[0] >= self._value for rank in ranking)
        known: list[float] = []
        for request in requests:
            own = self._known.get(request, [1.0])
            known += (own + own[-1:] * request.num_planned)[: request.num_planned]
        known.sort(reverse=True)
        expected = [len(requests) + sum(known[:count]) for count in range(len(known) + 1)]
        costs = self._table.verify_us(num_other_rows + np.arange(len(expected)))
        return int((np.array(expected) / costs).argmax())

    def _compare(self, step: StepOutput) -> None:
        ranking, budget = self._rounds.popleft()
        want = Counter(step.requests[index] for _, _, index, _ in ranking[:budget])
        for request, draft, rows, tokens, kept in zip(
            step.requests,
            step.drafts,
            step.counts,
            step.plan.tokens.tolist(),
            step.emitted,
            strict=True,
        ):
            assert rows == 1 + want[request]
            if draft is not None:
                assert tokens[1:rows] == as_list(draft.tokens)[: rows - 1]
            if kept:  # or it had ended when the round was read
                self.verified[request] += rows - 1


# One row more for each of four is free, so that drafting never stops; further ones cost.
FIRST_ARE_FREE = CostTable(((8, 10.0), (12, 14.0), (60, 60.0)), ((1, 0.0),), 0, {})
ADAPTIVE = ["schedule:[[1,9,2]]", "threshold:0.3", "auto"]
SPECULATORS = ["ngram", "trie", "draft", "dspark", "dspark-ahead", "dspark-tree"]


JOBS = [  # greedy, drawn like the target draws, and judged by rejection
    (prompt, helpers.greedy(24, **sampling))
    for sampling in ({}, {"temperature": 0.9, "seed": 7}, {"temperature": 0.9})
    for prompt in PROMPTS[1:]
]


@pytest.fixture(scope="module")
def plainly(qwen3: Path) -> tuple[LLM, list[list[int]]]:
    """An engine without drafts, and what it makes of the jobs."""
    plain = helpers.make_llm(qwen3)
    prompts, params = zip(*JOBS, strict=True)
    return plain, helpers.token_ids(plain, list(prompts), list(params))


@pytest.mark.parametrize("adaptive", ADAPTIVE)
@pytest.mark.parametrize("speculator", SPECULATORS)
def test_arrivals_aborts_and_preemptions_never_mix_requests_up(
    qwen3: Path,
    tmp_path: Path,
    plainly: tuple[LLM, list[list[int]]],
    speculator: str,
    adaptive: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (plain, want), jobs = plainly, JOBS
    options: dict[str, Any] = {"speculator": speculator.removesuffix("-ahead")}
    if speculator == "draft":
        options["draft"] = str(qwen3)
    elif "dspark" in speculator:
        taught = [prompt + own for (prompt, _), own in zip(jobs, want, strict=True)]
        drafter = helpers.make_drafter(tmp_path / "drafter", qwen3, taught=taught)
        options["draft"] = str(drafter)
    costs = table_for(plain, tmp_path / "costs.json", FIRST_ARE_FREE, monkeypatch)
    options |= {"adaptive": adaptive, "cost_table": str(costs), "page_size": 3}
    options |= {"run_ahead": "on" if "ahead" in speculator else "off", "max_num_batched_tokens": 24}
    engine = helpers.make_llm(
        qwen3, num_pages=36, max_model_len=100, max_num_seqs=4, **options
    ).engine
    recount = Recount(engine, adaptive, FIRST_ARE_FREE)
    rng = random.Random(adaptive + speculator)
    left, live, done = list(range(len(jobs))), [], {}
    rng.shuffle(left)
    while left or engine.has_work:
        if left and rng.random() < 0.5:
            live.append(engine.add(*jobs[left[-1]]))
            done[live[-1]] = left.pop()
        if live and rng.random() < 0.05:
            engine.abort(live.pop(rng.randrange(len(live))))
        for request in engine.step():
            assert request.stats.verified <= request.stats.drafted
    for request, job in done.items():
        if request.shares_noise:
            assert request.output_token_ids == want[job][: request.num_output]
        assert request.finish_reason == "abort" or request.num_output == 24
        assert request.stats.verified == recount.verified[request]
    assert engine.pages.num_free == engine.pages.num_pages
    assert engine.scheduler.num_preemptions > 0
    assert 0 < engine.stats.verified < engine.stats.drafted


@pytest.mark.parametrize("speculator", ["ngram", "dspark", "dspark-ahead", "dspark-tree"])
def test_a_probe_of_some_requests_changes_no_output_and_goes_on_or_ends(
    qwen3: Path,
    tmp_path: Path,
    plainly: tuple[LLM, list[list[int]]],
    speculator: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests come and go; a round with few rows is cheap, so that drafting comes back."""
    monkeypatch.setattr(adaptive_module, "PROBE_REQUESTS", 2)
    monkeypatch.setattr(adaptive_module, "PROBE_ROUNDS", 4)
    (plain, want), rng = plainly, random.Random(speculator)
    table = CostTable(((3, 10.0), (4, 40.0), (60, 4000.0)), ((1, 0.5), (4, 2.0)), 0, {})
    options: dict[str, Any] = {"speculator": speculator.removesuffix("-ahead"), "max_num_seqs": 4}
    if "dspark" in speculator:
        taught = [prompt + own for (prompt, _), own in zip(JOBS, want, strict=True)]
        options["draft"] = str(helpers.make_drafter(tmp_path / "drafter", qwen3, taught=taught))
    costs = table_for(plain, tmp_path / "costs.json", table, monkeypatch)
    options |= {"adaptive": "auto", "cost_table": str(costs)}
    options |= {"run_ahead": "on" if "ahead" in speculator else "off"}
    engine = helpers.make_llm(qwen3, **options).engine
    drafting: Counter[tuple[int, int]] = Counter()  # of so many requests so many: rounds

    def observe(step: StepOutput) -> None:
        drafting[len(step.requests), sum(draft is not None for draft in step.drafts)] += 1

    engine.observers.append(observe)
    left, done = list(range(len(JOBS))), {}
    while left or engine.has_work:
        is_last = len(left) == 1  # which comes when it is alone
        if left and (not engine.has_work if is_last else rng.random() < 0.2):
            job = left.pop()
            done[engine.add(*JOBS[job])] = job
        engine.step()
    for request, job in done.items():
        assert request.num_output == 24
        if request.shares_noise:
            assert request.output_token_ids == want[job]
    assert sum(drafting[4, own] for own in (1, 2)) > 1  # probes
    assert drafting[4, 0] > drafting[4, 2]  # which do not pay
    assert drafting[1, 1] > 2 and engine.pages.num_free == engine.pages.num_pages


def test_an_estimator_learns_what_is_accepted() -> None:
    estimator = AcceptanceEstimator()
    request = helpers.make_request([1, 2, 3])

    def guess() -> list[float]:
        (draft,) = estimator.complete([request], [Draft([5, 6, 7])])
        assert draft is not None and draft.survival is not None
        return list(draft.survival)

    first = guess()
    assert first == sorted(first, reverse=True) and first[-1] > 0
    for _ in range(300):  # the first draft always survives, the second never
        (draft,) = estimator.complete([request], [Draft([5, 6, 7])])
        step = {"requests": [request], "drafts": [draft], "counts": [4], "path": [[0, 1]]}
        step |= {"deepest": lambda index: 4}
        estimator.observe(type("Step", (), step))  # type: ignore[arg-type]
    last = guess()
    assert last[0] > 0.9 and last[1] < 0.15 and last[2] <= last[1]


def test_a_tree_is_put_in_the_order_of_its_survival() -> None:
    draft = Draft([5, 6, 7, 8], [0, 1, 0, 3], survival=[0.2, 0.1, 0.7, 0.6])
    (found,) = AcceptanceEstimator().complete([helpers.make_request([1])], [draft])
    assert found is not None and found.survival is not None and found.parents is not None
    assert list(found.survival) == sorted(found.survival, reverse=True)
    pairs = {(0, 5), (5, 6), (0, 7), (7, 8)}  # who follows whom
    names = [0, *found.tokens]
    assert {
        (names[parent], token) for token, parent in zip(found.tokens, found.parents, strict=True)
    } == pairs


def test_auto_refuses_a_table_of_something_else(qwen3: Path, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    FLAT.save(path)
    stored = json.loads(path.read_text()) | {"about": {"model": "another"}}
    path.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="another"):
        helpers.make_llm(qwen3, speculator="ngram", adaptive="auto", cost_table=str(path))


def test_mask_plans_cannot_be_adaptive(qwen3: Path) -> None:
    with pytest.raises(ConfigError, match="mask plans"):
        helpers.make_llm(
            qwen3,
            speculator="examples.lookahead:LookaheadSpeculator",
            adaptive="threshold:0.5",
        )


def test_each_mode_is_its_policy() -> None:
    kinds = {"off": Policy, "schedule:[[1,2,3]]": Schedule, "threshold:0.5": Threshold}
    for adaptive, kind in kinds.items():
        config = EngineConfig(model="x", adaptive=adaptive)
        assert type(create_policy(config, 7, {})) is kind


@pytest.mark.parametrize("speculator", ["ngram", "dspark"])
def test_speculation_comes_back_when_load_falls(
    qwen3: Path, tmp_path: Path, speculator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four rows cost the same, each one more costs dearly: six requests cannot afford a draft.
    steps = CostTable(((4, 10.0), (5, 1e3), (99, 1e6)), ((1, 0.0),), 4, {})
    costs = table_for(run(qwen3)[1], tmp_path / "costs.json", steps, monkeypatch)
    options = {"speculator": speculator, "adaptive": "auto", "cost_table": str(costs)}
    if speculator == "dspark":
        options["draft"] = str(helpers.make_drafter(tmp_path / "drafter", qwen3))
    llm = helpers.make_llm(qwen3, **options)
    verified: dict[int, list[int]] = {}

    def observe(step: StepOutput) -> None:
        count = len(step.requests)
        verified.setdefault(count, []).append(sum(step.counts) - count)

    llm.engine.observers.append(observe)
    params = [helpers.greedy(length) for length in (10, 10, 10, 10, 120, 120)]
    want = helpers.token_ids(helpers.make_llm(qwen3), PROMPTS, params)
    assert helpers.token_ids(llm, PROMPTS, params) == want
    assert sum(verified[6]) == 0 and max(verified[2]) == 2
