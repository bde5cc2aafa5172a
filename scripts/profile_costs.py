#!/usr/bin/env python3
"""Measure what a round costs, by rows, and what drafting costs, by requests: a cost table.

Real rounds of an idle engine are timed, in which N greedy requests have drafts of random tokens
(trees where the speculator verifies trees). Where there are CUDA graphs, every tier is filled to
its last row, by as many N as can fill it, and what is beyond their plans by prompts beside; else
the sizes are N requests with each of --drafts. In between costs are a step function or a line.
What a policy itself takes to choose is left out, as is learning survivals (estimators).

The engine is as the options say, and the table serves engines of the same options: it is refused
for another model, drafter, device, dtype, attention, draft length, run-ahead, largest graph or
version of torch (`nanospec.spec.speculator.about`). The other versions, the commit and the context
length are stored to be read.

Example:
    python scripts/profile_costs.py --model models/smollm2 --draft models/smollm2-dspark \\
        --out costs.json --plot costs.png
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanospec import LLM, SamplingParams
from nanospec.config import MAX_DRAFT_LEN, EngineConfig
from nanospec.engine.engine import Engine
from nanospec.spec.budget import CostTable
from nanospec.spec.speculator import about
from nanospec.types import Draft, DraftRows, PlanKind, Request

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SEED = 0  # of prompts and drafts
WARM_UP = 3  # rounds before the first that is timed, until all in flight are alike
STRETCHES = 3  # on a GPU; the median counts. On a CPU each round and each draft is timed by itself

# Options of the script that are the engine's, with their types.
ENGINE_OPTIONS: dict[str, type] = {
    "draft": str,
    "speculator": str,
    "max_draft_len": int,
    "dtype": str,
    "device": str,
    "load_format": str,
    "attention": str,
    "run_ahead": str,
    "max_graph_rows": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
}

Propose = Callable[..., Sequence[Draft | None]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a round holds."""

    requests: int
    drafts: int  # of all requests together, shared out evenly
    prompt_rows: int = 0  # of prompts that begin and end in it

    @property
    def rows(self) -> int:
        """T."""
        return self.requests + self.drafts + self.prompt_rows


class Bench:
    """Times rounds of an engine.

    Invariant: between calls the engine has no requests.
    """

    def __init__(self, engine: Engine, *, context: int, rounds: int):
        """Find out how drafts come.

        Args:
            engine: idle.
            context: tokens of each prompt.
            rounds: to time of each size.
        """
        self.engine, self._context = engine, context
        on_gpu = engine.device.type == "cuda"
        # How many stretches of how many.
        self._rounds = (STRETCHES, max(rounds // STRETCHES, 1)) if on_gpu else (rounds, 1)
        self._drafts = (STRETCHES, rounds) if on_gpu else (rounds, 1)
        self.most_drafts = engine.speculator.effective.max_rows - 1
        self.tiers: Sequence[int] = getattr(engine._ctx.runner, "tiers", ())
        self.max_num_seqs = engine.speculator.setup.config.max_num_seqs
        self.max_rows = engine.scheduler.max_num_batched_tokens
        self._hook = "propose_ahead" if engine._ctx.runs_ahead else "propose"
        self._generator = torch.Generator().manual_seed(SEED)
        self._prompts = self._random_tokens(self.max_num_seqs, context)
        self._filling: list[Request] = []  # whose prompts fill the round in flight
        self._like = next(iter(self._drafting(1)[1]), None)  # a draft of the drafter's own

    def shapes(self, rows: int, loads: Sequence[int]) -> list[Shape]:
        """Return rounds of so many rows, of different loads, without prompts where there are any.

        There are none of more rows than all plans hold, if there is nobody left to bring prompts.
        Exits where plans could hold so many, and those of no load do.
        """
        found = []
        for load in loads:
            drafts = min(rows - load, load * self.most_drafts)
            shape = Shape(load, drafts, rows - load - drafts)
            if drafts >= 0 and shape.prompt_rows <= (self.max_num_seqs - load) * self._context:
                found.append(shape)
        if not found and rows <= self.max_num_seqs * (1 + self.most_drafts):
            sys.exit(f"none of {list(loads)} requests can fill {rows} rows; pass more --requests")
        return [shape for shape in found if shape.prompt_rows == 0] or found

    def round_us(self, shape: Shape) -> float:
        """Return the microseconds of a round, drafting left out.

        A step returns when a round's answer has come, so from one to the next it is a round's time,
        where rounds run ahead too; waiting for the device beside would leave it idle for a while.
        """
        seen: list[tuple[int, int]] = []
        observers = self.engine.observers
        observers.append(lambda step: seen.append((step.num_tokens, step.tier)))
        try:
            running = self._add(shape.requests)
            drafts = self._random_drafts(running, shape.drafts)
            self._finish_prompts(running)
            with self._proposing(lambda going, *_: [drafts.get(request) for request in going]):
                for _ in range(WARM_UP):
                    self._step(shape)
                seen.clear()
                micros = _median_us(lambda: self._step(shape), self._rounds)
        finally:
            observers.pop()
            self._clear()
        if seen != [(shape.rows, shape.rows)] * math.prod(self._rounds):
            sys.exit(
                f"rounds of {shape} had (rows, tier) {sorted(set(seen))}, not {shape.rows}; there "
                f"may be too few KV pages for so many requests: lower --max-num-seqs or --context"
            )
        return micros

    def drafting_us(self, requests: int) -> float:
        """Return the microseconds of drafting for so many requests; graphs are replayed as ever."""
        return self._drafting(requests)[0]

    def _drafting(self, requests: int) -> tuple[float, list[Draft | None]]:
        """Time the drafter; return what it drafts too. A speculator without drafts takes 0."""
        propose: Propose = getattr(self.engine.speculator, self._hook)
        micros, drafts = 0.0, []

        def timed(*args: Any) -> list[Draft | None]:
            nonlocal micros
            drafts[:] = propose(*args)  # whatever is to be compiled is now
            micros = _median_us(lambda: propose(*args), self._drafts, wait=_wait)
            return [None] * len(drafts)

        try:
            running = self._add(requests)
            self._finish_prompts(running)
            with self._proposing(timed):
                self.engine.step()
        finally:
            self._clear()
        return micros, drafts

    def _step(self, shape: Shape) -> None:
        for request in self._filling:
            self.engine.abort(request)
        count = -(-shape.prompt_rows // self._context)
        lengths = _shares(shape.prompt_rows, count)
        self._filling = [
            self.engine.add(self._random_tokens(1, length)[0], GREEDY) for length in lengths
        ]
        self.engine.step()

    def _add(self, requests: int) -> list[Request]:
        """Add requests; the prefix cache knows most of their prompts from the time before."""
        return [self.engine.add(prompt, GREEDY) for prompt in self._prompts[:requests]]

    def _finish_prompts(self, running: Sequence[Request]) -> None:
        """Bring all requests to where they generate, without drafts, or the first got far ahead."""
        with self._proposing(lambda going, *_: [None] * len(going)):
            while any(request.num_output == 0 for request in running):
                self.engine.step()

    def _clear(self) -> None:
        scheduler = self.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self.engine.abort(request)
        while self.engine.has_work:
            self.engine.step()
        self._filling = []

    @contextmanager
    def _proposing(self, propose: Propose) -> Iterator[None]:
        """Have drafts proposed by a function."""
        setattr(self.engine.speculator, self._hook, propose)
        try:
            yield
        finally:
            delattr(self.engine.speculator, self._hook)

    def _random_drafts(self, requests: Sequence[Request], count: int) -> dict[Request, Draft]:
        """Return so many drafts in all, as lists, tensors or rows of one: as the drafter's come."""
        lengths = _shares(count, len(requests))
        tokens: Any = self._random_tokens(len(requests), max(lengths))
        if self._like is not None and isinstance(self._like.tokens, Tensor):
            tokens = torch.tensor(tokens, dtype=torch.int64, device=self.engine.device)
        if self._like is not None and self._like.origin is not None:
            drafts = DraftRows(tokens, None, None).drafts(lengths)
        else:
            is_tree = self.engine.speculator.effective.kind >= PlanKind.TREE
            drafts = [
                Draft(own[:length], self._random_parents(length) if is_tree else None)
                for own, length in zip(tokens, lengths, strict=True)
            ]
        pairs = zip(requests, drafts, strict=True)
        return {request: draft for request, draft in pairs if len(draft) > 0}

    def _random_parents(self, count: int) -> list[int]:
        """Return parents of a tree; two rows or more are no chain, which needs no mask."""
        parents = [
            int(torch.randint(row + 1, (1,), generator=self._generator)) for row in range(count)
        ]
        if count > 1:
            parents[1] = 0
        return parents

    def _random_tokens(self, rows: int, columns: int) -> list[list[int]]:
        vocab_size = self.engine.model_config.vocab_size
        return torch.randint(vocab_size, (rows, columns), generator=self._generator).tolist()


def _shares(total: int, count: int) -> list[int]:
    """Share a number out evenly."""
    share, rest = divmod(total, max(count, 1))
    return [share + (index < rest) for index in range(count)]


def _median_us(
    run: Callable[[], object], stretches: tuple[int, int], wait: Callable[[], None] = lambda: None
) -> float:
    """Return the microseconds of a run: the median of so many stretches of so many runs.

    Args:
        run: what to time.
        stretches: how many, and runs of each.
        wait: until what a stretch has launched is done, where runs do not wait themselves.
    """
    count, length = stretches
    found = []
    for _ in range(count):
        wait()
        started = time.perf_counter()
        for _ in range(length):
            run()
        wait()
        found.append((time.perf_counter() - started) / length * 1e6)
    return statistics.median(found)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sizes_beyond(largest: int, most: int) -> list[int]:
    """Return sizes beyond the largest tier: 1.5 times it, then doubling, to the most rows."""
    sizes = []
    size = largest * 3 // 2
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most] if most > largest else []


def shapes_to_time(bench: Bench, loads: Sequence[int], drafts: Sequence[int]) -> list[Shape]:
    """Return all rounds to time, those of the same requests together."""
    if bench.tiers:
        # A full forward may have a graph of its own; those between it and the tiers have none.
        rows = [*bench.tiers, *sizes_beyond(bench.tiers[-1], bench.max_rows - 1)]
        found = [shape for size in rows for shape in bench.shapes(size, loads)]
    else:
        wanted = {min(each, bench.most_drafts) for each in drafts}
        found = [Shape(load, load * each) for load in loads for each in wanted]
        found = [shape for shape in found if shape.rows <= bench.max_rows]
    return sorted(found, key=lambda shape: (shape.requests, shape.rows))


def profile(bench: Bench, loads: Sequence[int], drafts: Sequence[int]) -> CostTable:
    """Time rounds and drafting; where several loads make the same rows, the median counts."""
    drafting = [
        (load, bench.drafting_us(load)) for load in tqdm(loads, desc="drafting", disable=None)
    ]
    costs: dict[int, list[float]] = {}
    for shape in tqdm(shapes_to_time(bench, loads, drafts), desc="rounds", disable=None):
        costs.setdefault(shape.rows, []).append(bench.round_us(shape))
    verify = [(rows, statistics.median(costs[rows])) for rows in sorted(costs)]
    largest = max((rows for rows in costs if rows in bench.tiers), default=0)
    return CostTable(tuple(verify), tuple(drafting), largest_tier=largest, about={})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; print a table, then one JSON line; write the cost table."""
    args = parse_args(argv)
    given = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    options = {name: value for name, value in given.items() if value is not None}
    config = EngineConfig.from_options({"model": args.model} | options)
    loads = parse_loads(args.requests, config.max_num_seqs)
    # Prompts come in turns, each of which lets earlier ones generate a token; whatever is accepted
    # then, the end must stay out of sight. What plans add to a forward's rows is not known here.
    turns = max(loads) * args.context // config.forward_rows(plan_rows=1) + 1
    timed = (WARM_UP + max(args.rounds, STRETCHES) + 2) * (1 + (config.max_draft_len or 16))
    longest = args.context + turns + timed + 2 * MAX_DRAFT_LEN
    llm = LLM(args.model, max_model_len=longest, **options)
    bench = Bench(llm.engine, context=args.context, rounds=args.rounds)
    measured = profile(bench, loads, [int(each) for each in args.drafts.split(",")])
    speculator, origin = llm.engine.speculator, provenance()
    name, max_rows = type(speculator).__name__, speculator.resources().max_rows
    stated = about(speculator.setup, name, max_rows) | {
        "versions": json.dumps(origin["versions"]),
        "commit": origin["commit"],
        "context": str(args.context),
    }
    table = replace(measured, about=stated)
    table.save(args.out)
    print(f"{'rows':>6} {'verify us':>10}")
    for rows, us in table.verify:
        print(f"{rows:>6} {us:>10.0f}{'  tier' if rows <= table.largest_tier else ''}")
    print(f"{'requests':>8} {'draft us':>10}")
    for load, us in table.draft:
        print(f"{load:>8} {us:>10.0f}")
    if args.plot is not None:
        plot(args.plot, table)
    print(json.dumps(origin | asdict(table) | {"seed": SEED}))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hugging Face id (default: the embedded pair)")
    for name, kind in ENGINE_OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, help="of the engine, as for nanospec.generate")
    parser.add_argument("--requests", help="comma-separated (default: powers of 2, and the most)")
    drafts_help = "of a request, comma-separated; where there are graphs their tiers say how many"
    parser.add_argument("--drafts", default="0,1,2,3,5,7", help=drafts_help)
    parser.add_argument("--context", type=int, default=256, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=9, help="to time, of each size")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--plot", type=Path, help="PNG")
    return parser.parse_args(argv)


def parse_loads(text: str | None, most: int) -> list[int]:
    """Return numbers of requests; exits where they are more than may run."""
    if text is None:
        return sorted({1 << power for power in range(most.bit_length())} | {most})
    loads = sorted({int(each) for each in text.split(",")})
    if not 1 <= loads[0] <= loads[-1] <= most:
        sys.exit(f"--requests {text}: pass 1 to {most}, or a higher --max-num-seqs")
    return loads


def plot(path: Path, table: CostTable) -> None:
    """Draw cost by rows: tiers are steps, what is beyond them a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    tiers = np.array([rows for rows, _ in table.verify if rows <= table.largest_tier], dtype=int)
    rows = np.arange(table.largest_tier + 1, table.verify[-1][0] + 1)
    if len(tiers) > 0:
        axes.step(tiers, table.verify_us(tiers), where="pre", label="verify, padded to a tier")
    if len(rows) > 0:
        axes.plot(rows, table.verify_us(rows), label="verify, not padded")
    axes.plot(*zip(*table.verify, strict=True), "o", markersize=3, label="measured")
    axes.plot(*zip(*table.draft, strict=True), "s", markersize=3, label="draft, by requests")
    axes.set(xlabel="rows", ylabel="microseconds", xscale="log", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
