#!/usr/bin/env python3
"""Compare policies on paper: recorded rounds against a cost table, at any number of requests.

A simulated request goes through the rounds of a recorded one, in their order: what its drafts
promised, and how many tokens came out. The policies are those of the engine. They say when drafts
are made and how many are verified; the table says what that costs. So the load at which
speculation stops to pay can be found for machines that are not at hand.

A request that verifies fewer drafts than were recorded gets fewer tokens, and still goes on with
its next recorded round: the trace does not say what would have been drafted from where it is. A
prompt costs its last row alone. Pages and rows of a forward never run short.

Example:
    python -m nanospec.generate --prompts problems.jsonl --trace rounds.jsonl --output out.jsonl
    python scripts/simulate_load.py --trace rounds.jsonl --cost-table costs.json --plot load.png
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanospec import SamplingParams
from nanospec.spec.adaptive import Costs, Policy
from nanospec.spec.budget import CostTable, spread
from nanospec.text import TextStream
from nanospec.types import Budget, DraftRows, EngineView, Request

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance

WARM_UP = 8  # rounds that are not counted: at first nobody knows anything of any request


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """What the drafts of one request promised in a round, and what came of them."""

    survival: tuple[float, ...]  # [K] promised
    num_emitted: int  # tokens, as all K were verified


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests that were decoded with chains of drafts."""

    requests: Sequence[Sequence[RecordedRound]]  # rounds of each in order, the prompt's left out
    num_left_out: int = 0  # rounds with drafts that were not verified: nobody knows their fate

    @property
    def width(self) -> int:
        """Drafts of a request at most."""
        return max(len(each.survival) for rounds in self.requests for each in rounds)

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """Read a trace; exits where it cannot be replayed."""
        found: list[list[RecordedRound]] = []
        running: dict[int, list[RecordedRound]] = {}
        num_left_out = 0
        for line in path.read_text().splitlines():
            for record in json.loads(line)["requests"]:
                if not record["emitted"]:
                    continue  # it had ended, which a round that ran ahead did not know
                is_prompt = record["request"] not in running and not record["drafts"]
                if record["request"] not in running:
                    found.append(running.setdefault(record["request"], []))
                _check(record["drafts"], path)
                is_whole = all(draft["fate"] != "not verified" for draft in record["drafts"])
                if is_whole and not is_prompt:
                    survival = tuple(draft["survival"] for draft in record["drafts"])
                    emitted = RecordedRound(survival, len(record["emitted"]))
                    running[record["request"]].append(emitted)
                num_left_out += not is_whole
                if record["finish_reason"] is not None:
                    del running[record["request"]]
        recorded = cls([rounds for rounds in found if rounds], num_left_out)
        if not recorded.requests or recorded.width == 0:
            sys.exit(f"{path} holds no round whose drafts were all verified; trace a speculator")
        return recorded


def _check(drafts: Sequence[dict[str, Any]], path: Path) -> None:
    """Exit unless drafts are a chain with survivals."""
    if [draft["parent"] for draft in drafts] != list(range(len(drafts))):
        sys.exit(f"{path} holds drafts that are no chain, which are not simulated; trace a chain")
    if any(draft["survival"] is None for draft in drafts):
        sys.exit(
            f"{path} holds drafts without survivals; trace a drafter with confidences, or have "
            f"them estimated: --adaptive threshold:0"
        )


class Fixed(Policy):
    """So many drafts of every request."""

    def __init__(self, length: int):
        self._length = length

    def candidate_budget(self, view: EngineView, most: int) -> Budget:
        """See `Policy.candidate_budget`."""
        length = min(self._length, most)
        return Budget(view.num_running * length, 1 + length)


def policies(table: CostTable, width: int) -> dict[str, Callable[[], Policy]]:
    """Return how to make none, every fixed length, and adaptive."""
    named: dict[str, Callable[[], Policy]] = {"none": lambda: Fixed(0)}
    for length in range(1, width + 1):
        named[f"K={length}"] = lambda length=length: Fixed(length)
    return named | {"adaptive": lambda: Costs(table)}  # survivals are recorded, not learnt


def verified_counts(policy: Policy, requests: Sequence[Request]) -> list[int]:
    """Ask a policy how many drafts of each request a round verifies."""
    room = sum(request.num_planned for request in requests)
    verdict = policy.admit(requests, len(requests), room)
    if verdict.counts is not None:
        return verdict.counts.tolist()
    return [request.num_planned for request in requests]


@dataclass(frozen=True, slots=True)
class Round:
    """What a simulated round did."""

    drafted: int  # requests that drafts were made for
    verified: int  # drafts, of all requests
    tokens: int
    micros: float


@dataclass(slots=True)
class _Running:
    """A simulated request on its way through a recorded one."""

    request: Request
    rounds: Sequence[RecordedRound]
    place: int  # of the round that comes next

    @property
    def next(self) -> RecordedRound:
        return self.rounds[self.place]


class Simulation:
    """So many requests at once, under one policy; whoever ends is followed by another.

    The policy is asked in the order of an engine that runs ahead: for the next round's budget when
    the places of those who ended are taken again. Who is new has no drafts in its first round, the
    end of its prompt.
    """

    def __init__(self, recorded: Recorded, table: CostTable, policy: Policy, seed: int):
        self._recorded, self._table, self._policy = recorded, table, policy
        self._width = recorded.width
        self._rng = np.random.default_rng(seed)
        self._running: list[_Running] = []
        self._num_arrived = 0

    def step(self, load: int) -> Round:
        """Advance by a round of `load` requests; who is too many leaves."""
        for each in self._running[load:]:
            each.request.finish_reason = "abort"
        going = self._running[:load]
        drafted = self._draft(going, load)
        # At the beginning everybody is somewhere, or all would end together.
        anywhere = self._num_arrived == 0
        new = [self._arrival(anywhere=anywhere) for _ in range(load - len(going))]
        counts = verified_counts(self._policy, [each.request for each in going + new])
        tokens, verified = len(new), sum(counts)
        for each, count in zip(going, counts, strict=False):
            tokens += min(1 + count, each.next.num_emitted)
            each.place += 1
            each.request.draft, each.request.max_drafts = None, 0
            if each.place == len(each.rounds):
                each.request.finish_reason = "length"
        self._running = [each for each in going + new if not each.request.is_finished]
        micros = float(self._table.verify_us(np.array([load + verified]))[0])
        if drafted:
            micros += self._table.draft_us(drafted)
        return Round(drafted, verified, tokens, micros)

    def _draft(self, going: Sequence[_Running], load: int) -> int:
        """Make the drafts that the policy allows; return for how many requests."""
        view = EngineView(num_running=load, num_waiting=0, num_free_pages=0, page_size=16)
        budget = self._policy.candidate_budget(view, self._width)
        most = budget.max_rows_per_request - 1
        if most == 0 or budget.total_drafts == 0 or not going:
            return 0
        places = spread(len(going), budget.max_requests or len(going))
        going = [going[place] for place in places]
        share, rest = divmod(budget.total_drafts, len(going))
        lengths = [
            min(most, share + (index < rest), len(each.next.survival))
            for index, each in enumerate(going)
        ]
        padding = (0.0,) * self._width
        survival = [(each.next.survival + padding)[: self._width] for each in going]
        tokens = torch.zeros(len(going), self._width, dtype=torch.int64)
        drafts = DraftRows(tokens, None, torch.tensor(survival)).drafts(lengths)
        for each, draft in zip(going, drafts, strict=True):
            each.request.draft, each.request.max_drafts = draft, len(draft)
        return len(going)

    def _arrival(self, *, anywhere: bool) -> _Running:
        rounds = self._recorded.requests[self._rng.integers(len(self._recorded.requests))]
        place = int(self._rng.integers(len(rounds)))
        request = Request(
            request_id=self._num_arrived,
            prompt_token_ids=[0],
            params=SamplingParams(),
            seed=0,
            stop_token_ids=frozenset(),
            max_len=1,
            text=TextStream(None),
        )
        self._num_arrived += 1
        return _Running(request, rounds, place if anywhere else 0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy comes to at a load."""

    tokens_per_second: float
    verified: float  # drafts per request and round
    drafting: float  # share of the rounds that drafts were made for


def simulate(
    recorded: Recorded, table: CostTable, policy: Policy, load: int, rounds: int, seed: int
) -> Outcome:
    """Run so many rounds after a warm-up."""
    simulation = Simulation(recorded, table, policy, seed)
    done = [simulation.step(load) for _ in range(WARM_UP + rounds)][WARM_UP:]
    return Outcome(
        tokens_per_second=sum(each.tokens for each in done)
        / sum(each.micros for each in done)
        * 1e6,
        verified=sum(each.verified for each in done) / (rounds * load),
        drafting=sum(each.drafted > 0 for each in done) / rounds,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate; print a table and the crossover, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines of --trace FILE")
    parser.add_argument("--cost-table", type=Path, required=True)
    parser.add_argument("--requests", default="1,4,16,32,64,128,256,512,1024")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="PNG")
    args = parser.parse_args(argv)
    recorded = Recorded.read(args.trace)
    table = CostTable.load(args.cost_table, {})
    loads = [int(each) for each in args.requests.split(",")]
    found = {
        name: [simulate(recorded, table, make(), load, args.rounds, args.seed) for load in loads]
        for name, make in policies(table, recorded.width).items()
    }
    print(f"{'requests':>9}" + "".join(f"{name:>12}" for name in found) + "   adaptive:")
    for index, load in enumerate(loads):
        cells = "".join(f"{own[index].tokens_per_second:>12.0f}" for own in found.values())
        own = found["adaptive"][index]
        print(f"{load:>9}{cells}   {own.verified:.2f} drafts, in {own.drafting:.0%} of the rounds")
    crossover = {name: first_behind(own, found["none"], loads) for name, own in found.items()}
    for name in (f"K={recorded.width}", "adaptive"):
        print(f"{name} falls behind none at: {crossover[name] or 'no load tried'}")
    if args.plot is not None:
        plot(args.plot, loads, found)
    document: dict[str, Any] = {
        "rounds_recorded": sum(map(len, recorded.requests)),
        "rounds_left_out": recorded.num_left_out,
        "table": dict(table.about),
        "requests": loads,
    }
    for field in Outcome.__slots__:
        document[field] = {name: [getattr(o, field) for o in own] for name, own in found.items()}
    print(json.dumps(provenance() | document | {"seed": args.seed, "crossover": crossover}))


def first_behind(
    own: Sequence[Outcome], none: Sequence[Outcome], loads: Sequence[int]
) -> int | None:
    """Return the first load from which on a policy is slower than none, by over 1 %."""
    pairs = zip(own, none, strict=True)
    behind = [left.tokens_per_second < 0.99 * right.tokens_per_second for left, right in pairs]
    for index, load in enumerate(loads):
        if all(behind[index:]):
            return load
    return None


def plot(path: Path, loads: Sequence[int], found: dict[str, list[Outcome]]) -> None:
    """Draw tokens per second relative to none, by load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    none = [each.tokens_per_second for each in found["none"]]
    for name, own in found.items():
        ratio = [each.tokens_per_second / plain for each, plain in zip(own, none, strict=True)]
        axes.plot(loads, ratio, label=name, linewidth=2.5 if name == "adaptive" else 0.9)
    axes.set(xlabel="requests", ylabel="tokens per second, relative to none", xscale="log")
    axes.legend(ncols=2, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
