#!/usr/bin/env python3
"""Does it pay to choose whose drafts are verified? Fixed lengths against a shared pool.

Three arms on the same prompts, many requests at once: K drafts of every request, the most the
drafter makes of every request, and a pool of K on average shared out by survival. Without --model,
the embedded pair on its held-out problems, by family; else one group per prompt file.

Example:
    python scripts/budget_study.py --count 400
    python scripts/budget_study.py --model models/smollm2 --draft models/mine --prompts a.jsonl
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanospec import LLM, SamplingParams
from nanospec.stats import Stats

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance
from responses import prompt_ids
from word_problems import problems

SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}  # those of vLLM's study of this kind


def main(argv: Sequence[str] | None = None) -> None:
    """Run the arms; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hugging Face id (default: the embedded pair)")
    parser.add_argument("--draft", help="drafter: folder or Hugging Face id")
    parser.add_argument(
        "--prompts", type=Path, nargs="*", default=[], help="JSON lines, a group each"
    )
    parser.add_argument("--count", type=int, default=400, help="problems, or prompts of each file")
    parser.add_argument("--mean", type=int, default=5, help="K")
    parser.add_argument("--most", type=int, default=7, help="drafts of a request at most")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--speculator", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(argv)
    pool = f"schedule:[[1,{args.max_num_seqs},{args.mean}]]"
    arms: dict[str, dict[str, Any]] = {
        f"K={args.mean}": {"max_draft_len": args.mean},
        f"K={args.most}": {"max_draft_len": args.most},
        "adaptive": {"max_draft_len": args.most, "adaptive": pool},
    }
    found = {name: run(args, options) for name, options in arms.items()}
    groups = list(next(iter(found.values())))
    print(f"{'group':<24}" + "".join(f"{name:>20}" for name in arms) + f"{'gain':>8}")
    for group in groups:
        cells = [
            f"{own[group].acceptance_length:8.3f} ({mean_verified(own[group]):4.2f})"
            for own in found.values()
        ]
        first, *_, last = (own[group].acceptance_length for own in found.values())
        print(
            f"{group:<24}" + "".join(f"{cell:>20}" for cell in cells) + f"{last / first - 1:>8.1%}"
        )
    print("acceptance length (drafts verified per round)")
    numbers = {
        name: {
            group: {"length": stats.acceptance_length, "verified": mean_verified(stats)}
            for group, stats in own.items()
        }
        for name, own in found.items()
    }
    print(json.dumps(provenance() | {"arms": numbers}))


def run(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Stats]:
    """Return what the rounds of each group did, and all together; all groups run at once."""
    llm = LLM(
        args.model,
        draft=args.draft,
        speculator=args.speculator,
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=8192,
        **options,
    )
    prompts = load_prompts(args, llm)
    params = [
        SamplingParams(max_tokens=args.max_tokens, **SAMPLING)  # no seeds: judged by rejection
        for _ in prompts
    ]
    found = {"all": Stats()}
    outputs = llm.generate([ids for _, ids in prompts], params)
    for (group, _), output in zip(prompts, outputs, strict=True):
        found["all"].add(output.stats)
        found.setdefault(group, Stats()).add(output.stats)
    return found


def load_prompts(args: argparse.Namespace, llm: LLM) -> list[tuple[str, list[int]]]:
    """Return (group, token ids) of all prompts."""
    if args.prompts:
        assert args.model is not None
        return [
            (path.stem, ids)
            for path in args.prompts
            for ids in prompt_ids(args.model, path)[: args.count]
        ]
    if args.model is not None:
        sys.exit("--model needs --prompts")
    chosen = itertools.islice(problems(2, held_out=True), args.count)
    return [
        (
            problem.template.partition("/")[0],
            llm.encode_chat([{"role": "user", "content": problem.question}]),
        )
        for problem in chosen
    ]


def mean_verified(stats: Stats) -> float:
    """Return drafts verified per round."""
    return stats.verified / max(stats.rounds, 1)


if __name__ == "__main__":
    main()
