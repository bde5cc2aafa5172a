#!/usr/bin/env python3
"""Time the embedded pair on a CPU: the default command's first token, and speculation's gain.

Plain decoding, chains and trees answer the same held-out problems one by one, taking turns, for
each number of threads; what counts is their ratio within this run.

Example:
    python scripts/bench_pair.py --count 20
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanospec import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance

PROBLEMS = Path(__file__).resolve().parents[1] / "tests" / "data" / "word_problems_heldout.jsonl"
SPECULATORS = {"plain": "none", "chain": "dspark", "tree": "dspark-tree"}


def first_token_seconds(question: str) -> float:
    """Return the seconds from starting the default command to its first byte of output."""
    command = [sys.executable, "-m", "nanospec.generate", "--device", "cpu", question]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - started


def speeds(questions: list[str], threads: int, dtype: str) -> dict[str, Any]:
    """Return tokens per second and acceptance length of each speculator."""
    torch.set_num_threads(threads)
    engines = {
        name: LLM(speculator=speculator, device="cpu", dtype=dtype, max_model_len=512)
        for name, speculator in SPECULATORS.items()
    }
    params = SamplingParams(temperature=0.0, max_tokens=256)
    tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
    for index, question in enumerate(tqdm(questions, desc=f"{threads} threads, {dtype}")):
        for name, llm in engines.items():
            started = time.perf_counter()
            (output,) = llm.chat([{"role": "user", "content": question}], params)
            if index > 0:  # the first one warms up
                seconds[name] += time.perf_counter() - started
                tokens[name] += len(output.outputs[0].token_ids)
    return {
        name: {
            "tokens_per_second": tokens[name] / seconds[name],
            "acceptance_length": llm.stats.acceptance_length,
        }
        for name, llm in engines.items()
    }


def main() -> None:
    """Run both; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="problems, at least 2")
    parser.add_argument("--threads", default="1,2", help="comma-separated")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    args = parser.parse_args()
    lines = PROBLEMS.read_text().splitlines()[: max(args.count, 2)]
    questions = [json.loads(line)["question"] for line in lines]
    first = [first_token_seconds(question) for question in questions[:5]]
    print(f"first token after {statistics.median(first):.2f} s (most: {max(first):.2f} s)")
    print(f"{'threads':>7} {'dtype':<9}" + "".join(f"{name:>16}" for name in SPECULATORS))
    rows = []
    for threads in (int(each) for each in args.threads.split(",")):
        for dtype in args.dtypes.split(","):
            found = speeds(questions, threads, dtype)
            plain = found["plain"]["tokens_per_second"]
            cells = [
                f"{own['tokens_per_second']:8.1f} {own['tokens_per_second'] / plain:6.2f}x"
                for own in found.values()
            ]
            print(f"{threads:>7} {dtype:<9}" + "".join(f"{cell:>16}" for cell in cells))
            rows.append({"threads": threads, "dtype": dtype, "speculators": found})
    print(json.dumps(provenance() | {"first_token_seconds": first, "rows": rows}))


if __name__ == "__main__":
    main()
