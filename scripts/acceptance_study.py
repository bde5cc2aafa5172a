#!/usr/bin/env python3
"""How much of what a drafter guesses is accepted: by budget and group, by speculator and rule.

budgets: many requests at once, in three arms: K drafts of every request, the most there are of
every request, and at most those but K on average, shared out by survival. The same rows go further
where they go to those who use them. A group is a prompt file, or a family of the embedded pair's
held-out problems. Survivals are held against what was accepted, on the arm that verifies most.

speculators: chain and tree, greedy and sampled, rejection and shared noise, of a DSpark drafter,
and its calibration. Problems with an `answer` that ends in `#### N` also give the target's exact
match, greedy.

Both print tables and a last JSON line.

Example:
    python scripts/acceptance_study.py budgets --count 400 --reliability reliability.png
    python scripts/acceptance_study.py budgets --model models/smollm2 --draft models/mine \\
        --prompts code.jsonl chat.jsonl --count 100
    python scripts/acceptance_study.py speculators --model models/smollm2 --draft models/mine \\
        --problems gsm8k_test.jsonl --limit 100
"""

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanospec import LLM, SamplingParams
from nanospec.calibration import Calibration
from nanospec.config import EMBEDDED_PAIR
from nanospec.models.dspark import REGIMES, DSparkConfig
from nanospec.models.loader import resolve_model
from nanospec.stats import Stats
from nanospec.text import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
import reliability
from calibrate_confidence import REGIME_TEMPERATURES, collect, options_of, survival_error
from provenance import provenance
from responses import prompt_ids
from word_problems import problems

SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}  # of vLLM's study, pull request 48692
ALL = "all"  # the group of all prompts


def main(argv: Sequence[str] | None = None) -> None:
    """Run a study; print its tables, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--max-tokens", type=int, default=256, help="of a response (256)")
    common.add_argument("--device", default="auto")
    common.add_argument("--dtype", default="auto")
    studies = parser.add_subparsers(required=True, metavar="study")
    add_budget_options(
        studies.add_parser("budgets", parents=[common], help="whose drafts are verified")
    )
    add_speculator_options(
        studies.add_parser("speculators", parents=[common], help="ways to speculate")
    )
    args = parser.parse_args(argv)
    args.study(args)


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `budgets`."""
    parser.add_argument("--model", help="folder or Hugging Face id (default: the embedded pair)")
    parser.add_argument("--draft", help="drafter: folder or Hugging Face id")
    parser.add_argument("--speculator", default="auto", help="its drafts may lack confidences")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        help="JSON lines, a group each; of turns the first (default: held-out word problems)",
    )
    parser.add_argument("--count", type=int, default=400, help="of all, or of each file (400)")
    parser.add_argument("--mean", type=int, default=5, help="K (5)")
    parser.add_argument("--most", type=int, default=7, help="drafts of a request at most (7)")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="requests at once (128)")
    parser.add_argument("--reliability", type=Path, help="PNG: observed against predicted")
    parser.set_defaults(study=study_budgets)


def study_budgets(args: argparse.Namespace) -> None:
    """Compare the arms."""
    prompts = load_prompts(args)
    arms = {
        f"K={args.mean}": (args.mean, args.mean),
        f"K={args.most}": (args.most, args.most),
        "adaptive": (args.most, args.mean),
    }
    observers = {name: Calibration() for name in arms}
    found = {
        name: run_arm(args, prompts, most=most, mean=mean, observer=observers[name])
        for name, (most, mean) in tqdm(arms.items(), unit="arm")
    }
    counts = Counter(sorted(group for group, _ in prompts)) + Counter({ALL: len(prompts)})
    calibration = observers[f"K={args.most}"].as_dict()
    print_arms(found, counts)
    print_calibration(calibration)
    if args.reliability is not None:
        reliability.plot(args.reliability, calibration)
    numbers = {
        name: {
            group: {
                "length": stats.acceptance_length,
                "verified": mean_verified(stats),
                "rounds": stats.rounds,
            }
            for group, stats in own.items()
        }
        for name, own in found.items()
    }
    document = {"prompts": counts, "arms": numbers, "calibration": calibration}
    print(json.dumps(provenance() | document))


def load_prompts(args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """Return (group, token ids) of all prompts."""
    embedded = EMBEDDED_PAIR / "target"
    if args.prompts:
        names = [path.stem for path in args.prompts]
        if len({*names, ALL}) <= len(names):
            sys.exit(f"groups are named by file; no two may be the same, and none {ALL!r}: {names}")
        return [
            (path.stem, ids)
            for path in args.prompts
            for ids in prompt_ids(args.model or str(embedded), path)[: args.count]
        ]
    if args.model is not None:
        sys.exit("--model needs --prompts: the word problems are the embedded pair's")
    tokenizer = Tokenizer.load(embedded)
    assert tokenizer is not None, "it comes with the package"
    return [
        (
            problem.template.partition("/")[0],
            tokenizer.chat_ids([{"role": "user", "content": problem.question}]),
        )
        for problem in itertools.islice(problems(2, held_out=True), args.count)
    ]


def run_arm(
    args: argparse.Namespace,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    most: int,
    mean: int,
    observer: Calibration,
) -> dict[str, Stats]:
    """Return what the rounds of all prompts did, run together, and those of each group.

    Where `most` equals `mean` the pool holds every draft. Even so it is a pool, because that gives
    drafts without confidences a survival: an estimator, taught by the rounds before, serves them.
    """
    llm = LLM(
        args.model,
        draft=args.draft,
        speculator=args.speculator,
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_draft_len=most,
        adaptive=f"schedule:[[1,{args.max_num_seqs},{mean}]]",
    )
    llm.engine.observers.append(observer)
    # No seeds, so that drafts are judged by rejection.
    params = SamplingParams(max_tokens=args.max_tokens, **SAMPLING)
    found = {ALL: Stats()}
    outputs = llm.generate([ids for _, ids in prompts], params)
    for (group, _), output in zip(prompts, outputs, strict=True):
        found[ALL].add(output.stats)
        found.setdefault(group, Stats()).add(output.stats)
    return found


def mean_verified(stats: Stats) -> float:
    """Return drafts verified per round."""
    return stats.verified / max(stats.rounds, 1)


def print_arms(found: dict[str, dict[str, Stats]], counts: dict[str, int]) -> None:
    """Print a row per group: each arm, and what the last gains over the first."""
    print(f"{'group':<20} {'prompts':>7}" + "".join(f"{name:>17}" for name in found) + "    gain")
    for group, count in counts.items():
        own = [arm[group] for arm in found.values()]
        cells = [f"{each.acceptance_length:9.3f} ({mean_verified(each):.2f})" for each in own]
        first, last = own[0].acceptance_length, own[-1].acceptance_length
        gain = f"{last / first - 1:8.1%}" if first else "       -"
        print(f"{group:<20} {count:>7}" + "".join(f"{cell:>17}" for cell in cells) + gain)
    print("acceptance length (drafts verified per round)\n")


def print_calibration(calibration: dict[str, Any]) -> None:
    """Print predicted and observed survival by depth, and of all drafts."""
    print(f"{'depth':>5} {'drafts':>8} {'predicted':>9} {'observed':>8} {'error':>6}")
    for own in [*calibration["depths"], calibration]:
        print(
            f"{own.get('depth', ALL):>5} {own['count']:>8} {own['mean_predicted']:>9.3f} "
            f"{own['mean_observed']:>8.3f} {own['calibration_error']:>6.1%}"
        )


def add_speculator_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `speculators`."""
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
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.set_defaults(study=study_speculators)


def study_speculators(args: argparse.Namespace) -> None:
    """Measure chain and tree, greedy and sampled, and the calibration."""
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
    print_speculators(found)
    print(json.dumps(provenance() | found))


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


def print_speculators(found: dict[str, Any]) -> None:
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
