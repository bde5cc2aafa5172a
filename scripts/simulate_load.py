#!/usr/bin/env python3
"""Compare policies on paper: recorded rounds against a cost table, at any number of requests.

Every simulated request draws its rounds from those of a trace: what each draft promised, and how
many were accepted. A policy chooses how many drafts to verify; the table says what the round costs.
So the load at which speculation stops to pay can be found for machines that are not at hand.

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

import numpy as np
import torch

from nanospec.spec.budget import CostTable, admit, choose_budget

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rounds of chains that were verified whole."""

    survival: np.ndarray  # [N, K] promised
    accepted: np.ndarray  # [N]

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """Read a trace; rounds whose drafts were not all verified are left out."""
        survival, accepted = [], []
        for line in path.read_text().splitlines():
            for request in json.loads(line)["requests"]:
                drafts = request["drafts"]
                fates = [draft["fate"] for draft in drafts]
                if not drafts or drafts[0]["survival"] is None or "not verified" in fates:
                    continue
                survival.append([draft["survival"] for draft in drafts])
                accepted.append(fates.count("accepted"))
        longest = max(map(len, survival), default=0)
        whole = [index for index, own in enumerate(survival) if len(own) == longest]
        if not whole:
            sys.exit(f"{path} holds no round of drafts with survivals; trace a DSpark drafter")
        return cls(
            np.array([survival[index] for index in whole]),
            np.array([accepted[index] for index in whole]),
        )


# From survivals of an earlier round and of this one, [R, K], to drafts to verify, [R].
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]


def policies(table: CostTable, width: int) -> dict[str, Policy]:
    """Return none, every fixed length, and adaptive."""

    def fixed(length: int) -> Policy:
        return lambda _, now: np.full(len(now), length)

    def adaptive(earlier: np.ndarray, now: np.ndarray) -> np.ndarray:
        count = len(now)
        budget = choose_budget(earlier.flatten(), table, num_requests=count, num_other_rows=count)
        depth = torch.arange(1, width + 1).expand(count, -1)
        lengths = torch.full((count,), width)
        admitted = admit(torch.tensor(now), depth, lengths, torch.tensor(budget))
        return np.array(admitted.counts.tolist())

    named = {"none": fixed(0)} | {f"K={length}": fixed(length) for length in range(1, width + 1)}
    return named | {"adaptive": adaptive}


def simulate(
    recorded: Recorded, table: CostTable, policy: Policy, requests: int, rounds: int, seed: int
) -> tuple[float, float]:
    """Return tokens per second, and drafts verified per request and round."""
    rng = np.random.default_rng(seed)
    tokens, verified, micros = 0, 0, 0.0
    earlier = rng.integers(len(recorded.accepted), size=requests)
    for _ in range(rounds):
        now = rng.integers(len(recorded.accepted), size=requests)
        counts = policy(recorded.survival[earlier], recorded.survival[now])
        tokens += requests + int(np.minimum(counts, recorded.accepted[now]).sum())
        verified += int(counts.sum())
        micros += float(table.verify_us(np.array([requests + counts.sum()]))[0])
        if counts.any():
            micros += table.draft_us(requests)
        earlier = now
    return tokens / micros * 1e6, verified / (rounds * requests)


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
    width = recorded.survival.shape[1]
    loads = [int(each) for each in args.requests.split(",")]
    found = {
        name: [simulate(recorded, table, policy, load, args.rounds, args.seed) for load in loads]
        for name, policy in policies(table, width).items()
    }
    print(f"{'requests':>9}" + "".join(f"{name:>12}" for name in found) + "   drafts, adaptive")
    for index, load in enumerate(loads):
        cells = "".join(f"{own[index][0]:>12.0f}" for own in found.values())
        print(f"{load:>9}{cells}   {found['adaptive'][index][1]:.2f}")
    crossover = {name: first_behind(own, found["none"], loads) for name, own in found.items()}
    for name in (f"K={width}", "adaptive"):
        print(f"{name} falls behind none at: {crossover[name] or 'no load tried'}")
    if args.plot is not None:
        plot(args.plot, loads, found)
    document = {"rounds_recorded": len(recorded.accepted), "requests": loads}
    document |= {"tokens_per_second": {name: [t for t, _ in own] for name, own in found.items()}}
    print(json.dumps(provenance() | document | {"crossover": crossover}))


def first_behind(
    own: Sequence[tuple[float, float]], none: Sequence[tuple[float, float]], loads: Sequence[int]
) -> int | None:
    """Return the first load from which on a policy is slower than none, by over 1 %."""
    behind = [left < 0.99 * right for (left, _), (right, _) in zip(own, none, strict=True)]
    for index, load in enumerate(loads):
        if all(behind[index:]):
            return load
    return None


def plot(path: Path, loads: Sequence[int], found: dict[str, list[tuple[float, float]]]) -> None:
    """Draw tokens per second relative to none, by load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, own in found.items():
        ratio = [mine / none for (mine, _), (none, _) in zip(own, found["none"], strict=True)]
        axes.plot(loads, ratio, label=name, linewidth=2.5 if name == "adaptive" else 0.9)
    axes.set(xlabel="requests", ylabel="tokens per second, relative to none", xscale="log")
    axes.legend(ncols=2, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
