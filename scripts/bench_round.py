#!/usr/bin/env python3
"""Time rounds on a GPU: tokens per second, milliseconds a step, and what the GPU did in them.

N requests of --prompt random tokens decode together; steps between two synchronisations are timed
once all have started. A second, profiled stretch says how long the GPU was busy, how long it stood
idle between kernels and between steps, and which kernels took the time. A third one times each of a
round's steps. A forward reads at least its weights and the keys of its requests, once, whatever the
rows; beside what it does of that stand the copy bandwidth of the GPU, and the products of a forward
alone, by the library, in a graph. The longer the requests, the longer attention takes: their mean
length halfway stands there too, as drafts give some requests more tokens than others before all
have started.

Example:
    python scripts/bench_round.py --shapes qwen3-8b --modes none,dspark --batches 1,8,64,256
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from tqdm import tqdm

from nanospec import LLM, SamplingParams
from nanospec.engine.engine import Engine
from nanospec.llm import old_objects_left_alone
from nanospec.spec.registry import SPECULATORS
from nanospec.types import Request

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance
from round_steps import (
    STEPS,
    WAIT,
    copy_bandwidth,
    products_ms,
    step_times,
    timed_steps,
    work_of_forward,
)
from shapes import SHAPES, write_shapes
from synthetic import SyntheticDSpark

_LEAD_IN = 6  # steps left out: the host falls behind when the profiler starts
_GAP_US = 5.0  # longer than any pause between two kernels of a graph
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; print a table, then one JSON line."""
    args = parse(argv)
    if not torch.cuda.is_available():
        sys.exit("rounds are timed on a GPU, and none is usable here")
    with tempfile.TemporaryDirectory() as folder:
        model, draft = args.model, args.draft
        if args.shapes is not None:
            model, draft = map(str, write_shapes(args.shapes, Path(folder)))
        found = [
            row | {"mode": mode}
            for mode in args.modes.split(",")
            for row in bench_mode(args, mode, model, draft)
        ]
    print(
        f"{'mode':<18} {'batch':>5} {'tok/s':>8} {'ms/step':>8} {'slowest':>8} "
        f"{'tok/step':>8} {'rows':>6} {'context':>7} {'busy':>6} {'idle between':>12} "
        f"{'kernels':>7} {'waits':>5}"
    )
    for row in found:
        print(
            f"{row['mode']:<18} {row['batch']:>5} {row['tokens_per_second']:>8.0f} "
            f"{row['step_ms']:>8.3f} {row['slowest_step_ms']:>8.3f} "
            f"{row['tokens_per_step']:>8.2f} {row['rows_per_step']:>6.1f} {row['context']:>7.1f} "
            f"{row['busy']:>6.1%} {row['idle_between']:>12.1%} {row['kernels']:>7.0f} "
            f"{row['waits']:>5.1f}"
        )
    print_steps(found)
    ceilings = {"copy_tb_s": copy_bandwidth(torch.device("cuda")) / 1e12}
    print(f"a copy reads and writes {ceilings['copy_tb_s']:.2f} TB/s")
    print(json.dumps(provenance() | ceilings | {"rows": found}))


def print_steps(found: Sequence[dict[str, Any]]) -> None:
    """Print the second table: the forward beside its floor, and every step."""
    print(
        f"\n{'mode':<18} {'batch':>5} {'forward':>8} {'products':>8} {'TB/s':>5} {'TFLOP/s':>7}  "
        f"ms of a round's steps on the device (on the host)"
    )
    for row in found:
        steps = row["steps"]
        own = ", ".join(
            f"{name} {steps['device_ms'][name]:.3f} ({steps['host_ms'][name]:.2f})"
            for name in STEPS
        )
        print(
            f"{row['mode']:<18} {row['batch']:>5} {row['forward_ms']:>8.3f} "
            f"{row['products_ms']:>8.3f} {row['forward_tb_s']:>5.2f} "
            f"{row['forward_tflop_s']:>7.1f}  {own}, waiting ({steps['host_ms'][WAIT]:.2f})"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hugging Face id (default: the embedded pair)")
    parser.add_argument("--draft", help="drafter: folder or Hugging Face id")
    parser.add_argument("--shapes", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument(
        "--modes",
        default="none,dspark",
        help="speculators, comma-separated; NAME+adaptive takes --adaptive",
    )
    parser.add_argument("--adaptive", default="auto", help="of the modes NAME+adaptive")
    parser.add_argument("--cost-table", help="for --adaptive auto")
    parser.add_argument("--batches", default="1,8,32,64,128,256", help="comma-separated")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of each request, that are timed")
    parser.add_argument(
        "--repeats", type=int, default=3, help="stretches, of which the median counts"
    )
    parser.add_argument("--synthetic-acceptance", type=float, help="accept by coin; output is void")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--kv-cache-gib", type=float)
    parser.add_argument("--top", type=int, default=0, help="print so many kernels of each row")
    return parser.parse_args(argv)


def bench_mode(
    args: argparse.Namespace, mode: str, model: str | None, draft: str | None
) -> list[dict[str, Any]]:
    """Return a row for each batch size."""
    name, _, adaptive = mode.partition("+")
    if args.synthetic_acceptance is not None and name == "dspark":
        own = {"mean": args.synthetic_acceptance}
        # It costs what the drafter costs whose name it has: cost tables are made without coins.
        SPECULATORS["synthetic"] = type("DSparkSpeculator", (SyntheticDSpark,), own)
        name = "synthetic"
    batches = [int(each) for each in args.batches.split(",")]
    started = time.perf_counter()
    llm = LLM(
        model,
        draft=None if name in ("none", "ngram", "trie") else draft,
        speculator=name,
        adaptive=args.adaptive if adaptive else "off",
        cost_table=args.cost_table if adaptive and args.adaptive == "auto" else None,
        load_format="auto" if args.shapes is None else "dummy",
        attention=args.attention,
        kv_cache_gib=args.kv_cache_gib,
        max_model_len=args.prompt + 8 * args.tokens * args.repeats,
        max_num_seqs=max(batches),
        prefix_caching=False,
    )
    torch.cuda.synchronize()
    print(f"{mode}: started in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    found = [bench_batch(llm.engine, args, batch) for batch in tqdm(batches, desc=mode)]
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return found


def bench_batch(engine: Engine, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Time requests that decode together."""
    with old_objects_left_alone():
        return _bench_batch(engine, args, batch)


def _bench_batch(engine: Engine, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = engine.model_config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    shape = (batch, args.prompt)
    prompts = torch.randint(vocab_size, shape, generator=generator).tolist()
    requests = [engine.add(prompt, params) for prompt in prompts]
    while any(request.num_output < 2 for request in requests):
        engine.step()
    stretches = [stretch(engine, requests, args.tokens) for _ in range(args.repeats)]
    profiled = profile(engine, steps=8)
    if args.top:
        print_kernels(profiled.pop("top"), args.top)
    profiled.pop("top", None)
    gc.collect()  # of what the profiler leaves; else a timed step pays for it
    with timed_steps(engine) as spans:
        settled = engine.step_stats.steps
        for _ in range(2 * _LEAD_IN):
            engine.step()
        torch.cuda.synchronize()
    profiled["steps"] = step_times(spans, engine.step_stats.steps - settled)
    num_keys = sum(len(request.tokens) for request in requests)
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    median = {key: statistics.median(each[key] for each in stretches) for key in stretches[0]}
    return {"batch": batch} | median | profiled | forward(engine, profiled, median, num_keys)


def forward(
    engine: Engine, profiled: dict[str, Any], median: dict[str, float], num_keys: int
) -> dict[str, float]:
    """Return what the target's forward takes, reads and computes, and its products alone take."""
    runner = engine._ctx.runner
    decoder = runner._target  # type: ignore[attr-defined]
    rows = median["rows_per_step"]
    milliseconds = profiled["steps"]["device_ms"]["forward"]
    num_bytes, operations = work_of_forward(decoder, rows, rows, num_keys)
    return {
        "forward_ms": milliseconds,
        "forward_tb_s": num_bytes / milliseconds / 1e9,
        "forward_tflop_s": operations / milliseconds / 1e9,
        "products_ms": products_ms(decoder, round(rows), round(rows)),
    }


def stretch(engine: Engine, requests: Sequence[Request], tokens: int) -> dict[str, float]:
    """Run until each request got so many tokens on average; return rates."""
    before, steps_before = sum(r.num_output for r in requests), engine.step_stats.steps
    rows_before = engine.step_stats.rows
    wanted = before + tokens * len(requests)
    torch.cuda.synchronize()
    ends = [time.perf_counter()]
    while sum(request.num_output for request in requests) < wanted:
        for _ in range(4):
            engine.step()
            ends.append(time.perf_counter())
    torch.cuda.synchronize()
    seconds = time.perf_counter() - ends[0]
    made = sum(request.num_output for request in requests) - before
    steps = engine.step_stats.steps - steps_before
    return {
        "tokens_per_second": made / seconds,
        "step_ms": 1e3 * seconds / steps,
        "slowest_step_ms": 1e3 * max(after - before for before, after in pairwise(ends)),
        "tokens_per_step": made / steps,
        "rows_per_step": (engine.step_stats.rows - rows_before) / steps,
        "context": statistics.mean(len(r.tokens) for r in requests) - made / len(requests) / 2,
    }


def profile(engine: Engine, steps: int) -> dict[str, Any]:
    """Return what the GPU did in some steps, and how often the host waited for it in others."""
    # Without events of the host, whose recording would slow it down and leave the GPU idle.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(_LEAD_IN + steps):
            engine.step()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    kernels = kernels[len(kernels) * _LEAD_IN // (_LEAD_IN + steps) :]
    busy, idle, end = 0.0, 0.0, kernels[0][0]
    times: dict[str, list[float]] = defaultdict(list)
    for start, stop, name in kernels:
        times[name].append(stop - start)
        if start - end > _GAP_US:
            idle += start - end
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    span = end - kernels[0][0]
    top = sorted(times.items(), key=lambda pair: -sum(pair[1]))
    return {
        "busy": busy / span,
        "idle_between": idle / span,
        "kernels": len(kernels) / steps,
        "waits": count_waits(engine, steps) / steps,
        "top": [(name, sum(own) / steps, len(own) / steps) for name, own in top],
    }


def count_waits(engine: Engine, steps: int) -> int:
    """Return how often the host waited for the GPU in some steps."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            engine.step()
    return sum(event.name in WAITS for event in profiler.events())


def print_kernels(top: Sequence[tuple[str, float, float]], count: int) -> None:
    """Print the kernels that took most time, per step."""
    for name, micros, calls in top[:count]:
        print(f"    {micros:9.1f} us {calls:7.1f}x {name[:90]}", file=sys.stderr)


if __name__ == "__main__":
    main()
