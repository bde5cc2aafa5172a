#!/usr/bin/env python3
"""How much of what a drafter guesses is accepted: chain and tree, greedy and sampled, calibration.

Prints a table and a last JSON line. Rows of --problems with an `answer` that ends in `#### N` also
give the target's exact match, greedy.

Example:
    python scripts/acceptance_study.py --model models/smollm2 --draft models/smollm2-dspark \\
        --problems gsm8k_test.jsonl --limit 100
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanospec import LLM, SamplingParams
from nanospec.models.dspark import REGIMES, DSparkConfig
from nanospec.models.loader import resolve_model
from nanospec.stats import Stats

sys.path.insert(0, str(Path(__file__).resolve().parent))
from calibrate_confidence import REGIME_TEMPERATURES, collect, options_of, survival_error
from provenance import provenance
from responses import prompt_ids


def acceptance(
    model: str,
    draft: str,
    prompts: Sequence[Sequence[int]],
    *,
    speculators: Sequence[tuple[str, int]],
    temperatures: Sequence[float],
    max_tokens: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return acceptance length and rates for each speculator, temperature and way to accept.

    Args:
        model: target.
        draft: drafter.
        prompts: token ids, all run together.
        speculators: names, each with its most draft rows.
        temperatures: above 0 both rejection and shared noise are measured, for chains.
        max_tokens: of a response.
        options: of the engine.
    """
    found = []
    for speculator, max_draft_len in speculators:
        rules = ["rejection", "shared-noise"] if speculator == "dspark" else ["shared-noise"]
        for rule in rules:
            llm = LLM(
                model,
                draft=draft,
                speculator=speculator,
                max_draft_len=max_draft_len,
                acceptance=rule,
                **options,
            )
            for temperature in tqdm(temperatures, desc=f"{speculator} {rule}"):
                if temperature == 0 and rule != rules[-1]:
                    continue  # greedy requests know one rule
                params = [
                    SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
                    for seed in range(len(prompts))
                ]
                total = Stats()
                for output in llm.generate([list(prompt) for prompt in prompts], params):
                    total.add(output.stats)
                found.append(
                    {
                        "speculator": speculator,
                        "max_draft_len": max_draft_len,
                        "temperature": temperature,
                        "acceptance": "equal tokens" if temperature == 0 else rule,
                        "length": total.acceptance_length,
                        "rates": total.acceptance_rates,
                        "rounds": total.rounds,
                    }
                )
            del llm
    return found


def exact_match(
    model: str,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[str],
    max_tokens: int,
    **options: Any,
) -> float:
    """Return the share of greedy responses whose last `#### N` is that of the answer."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = LLM(model, **options).generate([list(prompt) for prompt in prompts], params)
    right = [
        final_number(output.outputs[0].text) == final_number(answer)
        for output, answer in zip(outputs, answers, strict=True)
    ]
    return sum(right) / len(right)


def final_number(text: str) -> str | None:
    """Return N of the last `#### N`."""
    found = re.findall(r"####\s*(-?[\d,.]*\d)", text)
    return found[-1].replace(",", "") if found else None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="target: folder or Hugging Face id")
    parser.add_argument("--draft", required=True, help="drafter: folder or Hugging Face id")
    parser.add_argument("--problems", type=Path, required=True, help="JSON lines, held out")
    parser.add_argument("--limit", type=int, help="use so many")
    parser.add_argument(
        "--calibration-problems",
        type=Path,
        help="JSON lines to measure the calibration on (default: --problems); the fewer, the more "
        "chance adds to the error",
    )
    parser.add_argument("--temperatures", default="0,1", help="comma-separated")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(argv)
    prompts = prompt_ids(args.model, args.problems)[: args.limit]
    rows = [json.loads(line) for line in args.problems.read_text().splitlines()][: args.limit]
    config = DSparkConfig.from_folder(resolve_model(args.draft))
    options = options_of(args) | {"max_model_len": args.max_model_len}
    results = acceptance(
        args.model,
        args.draft,
        prompts,
        speculators=[("dspark", config.block_size), ("dspark-tree", args.nodes)],
        temperatures=[float(each) for each in args.temperatures.split(",")],
        max_tokens=args.max_tokens,
        **options,
    )
    found: dict[str, Any] = {"prompts": len(prompts), "acceptance": results}
    if all("answer" in row for row in rows):
        answers = [row["answer"] for row in rows]
        found["exact_match"] = exact_match(args.model, prompts, answers, args.max_tokens, **options)
    if config.has_confidence:
        if args.calibration_problems is not None:
            prompts = prompt_ids(args.model, args.calibration_problems)
        found |= calibration(args, prompts, options)
    print_table(found)
    print(json.dumps(provenance() | found))


def calibration(
    args: argparse.Namespace, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Return the calibration error of the survival as it is served, and of how many rounds."""
    llm = LLM(args.model, draft=args.draft, speculator="dspark", **options)
    scaling = llm.engine.speculator.calibration.cpu()  # type: ignore[attr-defined]
    errors, counts = {}, {}
    for index, regime in enumerate(REGIMES):
        params = SamplingParams(temperature=REGIME_TEMPERATURES[regime], max_tokens=args.max_tokens)
        rounds = collect(llm, prompts, params)
        errors[regime] = survival_error(rounds, scaling[index])[0]
        counts[regime] = len(rounds.request)
    return {"calibration_error": errors, "calibration_rounds": counts}


def print_table(found: dict[str, Any]) -> None:
    """Print what was found, for people."""
    print(
        f"{'speculator':<12} {'rows':>4} {'T':>4} {'acceptance':<13} {'length':>6}  rate by depth"
    )
    for row in found["acceptance"]:
        rates = " ".join(f"{rate:.3f}" for rate in row["rates"])
        print(
            f"{row['speculator']:<12} {row['max_draft_len']:>4} {row['temperature']:>4} "
            f"{row['acceptance']:<13} {row['length']:>6.3f}  {rates}"
        )
    if "exact_match" in found:
        print(f"exact match, greedy: {found['exact_match']:.1%} of {found['prompts']}")
    errors = found.get("calibration_error", {})
    if errors:
        counts = found["calibration_rounds"]
        listed = ", ".join(
            f"{name} {error:.2%} ({counts[name]} rounds)" for name, error in errors.items()
        )
        print(f"calibration error of the survival: {listed}")


if __name__ == "__main__":
    main()
