#!/usr/bin/env python3
"""Compare nanospec on a CPU with transformers' generate: one request, and eight together.

Decoding one request streams every weight once per token, so both engines have the same floor; what
differs is the overhead around the matrix products. Eight requests share the streaming.

Machines are shared and noisy: only ratios within one run count. The engines take turns, and each
figure is the median over the rounds.

Example:
    python scripts/get_smollm2.py --out models/smollm2
    python scripts/bench_cpu.py --model models/smollm2
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from nanospec import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance

PROMPT = (
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many in all?"
)
BATCH = 8


def main() -> None:
    """Run the comparison; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or Hugging Face id")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=5, help="turns each engine takes")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()

    llm = LLM(args.model, device="cpu", dtype=args.dtype, max_model_len=1024, prefix_caching=False)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    prompt = llm.encode(PROMPT)
    contenders: dict[str, tuple[int, Callable[[], Any]]] = {
        "transformers, 1 request": (1, lambda: _reference(reference, prompt, args.tokens)),
        "nanospec, 1 request": (1, lambda: _nanospec(llm, [prompt], args.tokens)),
        f"nanospec, {BATCH} requests": (
            BATCH,
            lambda: _nanospec(llm, [prompt] * BATCH, args.tokens),
        ),
    }
    speeds = _measure(contenders, args.tokens, args.rounds)
    medians = {name: statistics.median(own) for name, own in speeds.items()}
    base = medians["transformers, 1 request"]
    print(f"{'engine':<26} {'tokens/s':>9} {'lowest':>8} {'highest':>8} {'ratio':>6}")
    for name, own in speeds.items():
        ratio = medians[name] / base
        print(f"{name:<26} {medians[name]:>9.1f} {min(own):>8.1f} {max(own):>8.1f} {ratio:>6.2f}")
    ratios = {name: value / base for name, value in medians.items()}
    print(json.dumps(provenance() | {"tokens_per_second": medians, "ratio": ratios}))


def _measure(
    contenders: dict[str, tuple[int, Callable[[], Any]]], tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Return tokens per second of every turn; a first turn of each warms up and is dropped."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for index in tqdm(range(rounds + 1), unit="round"):
        for name, (requests, run) in contenders.items():
            started = time.perf_counter()
            run()
            if index > 0:
                speeds[name].append(requests * tokens / (time.perf_counter() - started))
    return speeds


@torch.inference_mode()
def _reference(model: Any, prompt: list[int], tokens: int) -> None:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert output.shape[1] == len(prompt) + tokens


def _nanospec(llm: LLM, prompts: list[list[int]], tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)


if __name__ == "__main__":
    main()
