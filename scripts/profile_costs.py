#!/usr/bin/env python3
"""Measure what a round costs, by rows, and what drafting costs, by requests: a cost table.

Real rounds of an idle engine are timed: N requests, K drafts of random tokens each. Nothing is
padded here, so the table has no tiers. It is refused for another model, device or dtype.

Example:
    python scripts/profile_costs.py --model models/smollm2 --draft models/smollm2-dspark \\
        --out costs.json --plot costs.png
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanospec import LLM, SamplingParams
from nanospec.engine.engine import Engine
from nanospec.spec.budget import CostTable
from nanospec.spec.speculator import about
from nanospec.types import Draft, Request

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance


def measure(
    engine: Engine, requests: int, drafts: Sequence[int], *, context: int, rounds: int
) -> tuple[dict[int, float], float]:
    """Return the microseconds of a round by rows, drafting left out, and those of drafting."""
    speculator: Any = engine.speculator
    propose = speculator.propose
    drafting: list[float] = []
    generator = torch.Generator().manual_seed(0)
    vocab_size = engine.model_config.vocab_size
    wanted = 0

    def timed(going: Sequence[Request]) -> list[Draft | None]:
        _wait()
        started = time.perf_counter()
        propose(going)
        _wait()
        drafting.append(time.perf_counter() - started)
        random_tokens = torch.randint(vocab_size, (len(going), wanted), generator=generator)
        return [
            Draft(own[: request.max_drafts])
            for request, own in zip(going, random_tokens.tolist(), strict=True)
        ]

    speculator.propose = timed
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompts = torch.randint(vocab_size, (requests, context), generator=generator).tolist()
    running = [engine.add(prompt, params) for prompt in prompts]
    costs: dict[int, float] = {}
    try:
        while any(request.num_output == 0 for request in running):
            engine.step()
        for wanted in drafts:
            engine.step()  # drafts of this length come with the next round
            seconds = []
            for _ in range(rounds):
                before = len(drafting)
                _wait()
                started = time.perf_counter()
                engine.step()
                _wait()
                seconds.append(time.perf_counter() - started - sum(drafting[before:]))
            costs[requests * (1 + wanted)] = statistics.median(seconds) * 1e6
        return costs, statistics.median(drafting or [0.0]) * 1e6
    finally:
        speculator.propose = propose
        for request in running:
            engine.abort(request)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; print a table, then one JSON line; write the cost table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hugging Face id (default: the embedded pair)")
    parser.add_argument("--draft", help="drafter: folder or Hugging Face id")
    parser.add_argument("--speculator", default="auto")
    parser.add_argument("--requests", default="1,2,4,8,16,32,64,128,256", help="comma-separated")
    parser.add_argument("--drafts", default="0,1,2,3,5,7", help="of a request, comma-separated")
    parser.add_argument("--context", type=int, default=256, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=9, help="of which the median counts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--plot", type=Path, help="PNG")
    args = parser.parse_args(argv)
    loads = sorted({int(each) for each in args.requests.split(",")})
    drafts = [int(each) for each in args.drafts.split(",")]
    room = (args.rounds + 2) * len(drafts) * (1 + max(drafts))
    llm = LLM(
        args.model,
        draft=args.draft,
        speculator=args.speculator,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.context + room,
        max_num_seqs=max(loads),
        max_num_batched_tokens=max(2048, max(loads) * (1 + max(drafts))),
        prefix_caching=False,
    )
    found: dict[int, list[float]] = defaultdict(list)
    drafting = []
    for load in tqdm(loads, unit="load"):
        costs, draft_us = measure(
            llm.engine, load, drafts, context=args.context, rounds=args.rounds
        )
        for rows, us in costs.items():
            found[rows].append(us)
        drafting.append((load, draft_us))
    verify = tuple((rows, statistics.median(found[rows])) for rows in sorted(found))
    speculator = llm.engine.speculator
    stated = about(speculator.setup, type(speculator).__name__) | {
        "versions": json.dumps(provenance()["versions"]),
        "context": str(args.context),
    }
    table = CostTable(verify, tuple(drafting), largest_tier=0, about=stated)
    table.save(args.out)
    print(f"{'rows':>6} {'verify us':>10}")
    for rows, us in verify:
        print(f"{rows:>6} {us:>10.0f}")
    print(f"{'requests':>8} {'draft us':>10}")
    for load, us in drafting:
        print(f"{load:>8} {us:>10.0f}")
    if args.plot is not None:
        plot(args.plot, table)
    print(json.dumps(provenance() | {"verify": verify, "draft": drafting}))


def plot(path: Path, table: CostTable) -> None:
    """Draw cost by rows, with the tiers where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    rows = np.arange(1, table.verify[-1][0] + 1)
    axes.plot(rows, table.verify_us(rows), label="verify, as the table is read")
    axes.plot(*zip(*table.verify, strict=True), "o", markersize=3, label="measured")
    axes.plot(*zip(*table.draft, strict=True), "s", markersize=3, label="draft, by requests")
    axes.set(xlabel="rows", ylabel="microseconds", xscale="log", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
