#!/usr/bin/env python3
"""Calibrate a DSpark drafter's confidences: a scaling per slot and regime, stored beside it.

Sequential temperature scaling, with an offset: from the first slot to the last, the temperature and
the offset that make the survival (the product of the confidences up to a slot) come out as often as
it says, measured by the expected calibration error, those before it held fixed. An offset because
a drafter that has seen its text often is too sure everywhere, which no temperature mends. Requests
are split in two: one half to fit on, one to test on. Sampled requests are judged by rejection, as
those without a seed are; those that share noise accept a little less than their survival says.

Source: the DSpark paper (arXiv:2607.05147), section on confidence-scheduled verification.

Example:
    python scripts/calibrate_confidence.py --model models/smollm2 --draft models/smollm2-dspark \\
        --prompts questions.jsonl
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanospec import LLM, SamplingParams
from nanospec.models.dspark import CALIBRATION
from nanospec.models.loader import resolve_model
from nanospec.types import StepOutput, as_list

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance
from responses import prompt_ids

TEMPERATURE_GRID = torch.logspace(-3, 3, 31, base=2.0)
OFFSET_GRID = torch.linspace(-1.5, 1.5, 25)
NUM_BINS = 20
REGIME_TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}  # a regime is measured at this one


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds that verified chains: what each slot promised, and what became of it."""

    logits: Tensor  # [N, G] of the confidences
    offered: Tensor  # [N] drafts that count: none after a stop
    accepted: Tensor  # [N]
    request: Tensor  # [N] which request each is of

    def select(self, chosen: Tensor) -> "Rounds":
        """Return some rounds."""
        return Rounds(
            self.logits[chosen], self.offered[chosen], self.accepted[chosen], self.request[chosen]
        )

    def survival(self, scaling: Tensor) -> Tensor:
        """Return the promised survival [N, G] under temperatures and offsets [G, 2]."""
        return (self.logits / scaling[:, 0] + scaling[:, 1]).sigmoid().cumprod(dim=1)

    def outcome(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return which rounds offered a slot, and which of all kept it, [N] bool."""
        return self.offered > slot, self.accepted > slot


def collect(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rounds:
    """Run prompts and record their rounds; confidences are recorded without calibration."""
    rows: list[tuple[list[float], int, int, int]] = []
    size = llm.engine.speculator.effective.max_rows - 1

    def observe(step: StepOutput) -> None:
        for request, draft, count, path, emitted in zip(
            step.requests, step.drafts, step.counts, step.path, step.emitted, strict=True
        ):
            if draft is None:
                continue
            if draft.survival is None:
                sys.exit("the drafter has no confidence head, so there is nothing to calibrate")
            offered, accepted = count - 1, len(path) - 1  # the rows may not have sufficed for all
            if len(emitted) <= accepted:  # what a stop cut off does not count
                offered = accepted = len(emitted)
            alive = torch.tensor([1.0, *as_list(draft.survival)], dtype=torch.float64)
            kept = (alive[1:] / alive[:-1].clamp(min=1e-30)).clamp(1e-8, 1 - 1e-7)
            logits = kept.logit().tolist()
            rows.append(
                (logits + [0.0] * (size - len(logits)), offered, accepted, request.request_id)
            )

    speculator: Any = llm.engine.speculator
    calibrated = speculator.calibration.clone()
    with torch.inference_mode():  # in place, as CUDA graphs read it where it is
        speculator.calibration.copy_(torch.tensor([1.0, 0.0]).expand_as(calibrated))
    llm.engine.observers.append(observe)
    try:
        llm.generate([list(prompt) for prompt in prompts], params)
    finally:
        llm.engine.observers.remove(observe)
        with torch.inference_mode():
            speculator.calibration.copy_(calibrated)
    if not rows:
        sys.exit("no round verified a draft; pass more prompts or a larger --max-tokens")
    logits, offered, accepted, request = zip(*rows, strict=True)
    return Rounds(*(torch.tensor(column) for column in (logits, offered, accepted, request)))


def calibration_error(promised: Tensor, happened: Tensor) -> float:
    """Return the expected calibration error over bins of equal width.

    Args:
        promised: [N] probabilities.
        happened: [N] bool.
    """
    bins = (promised * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gap = torch.zeros(NUM_BINS, dtype=torch.float64)
    gap.index_add_(0, bins, promised.double() - happened.double())
    return float(gap.abs().sum() / max(len(promised), 1))


def survival_error(rounds: Rounds, scaling: Tensor) -> tuple[float, list[float]]:
    """Return the calibration error of the survival: the slots' mean by weight, and each slot's."""
    survival = rounds.survival(scaling)
    errors, weights = [], []
    for slot in range(survival.shape[1]):
        offered, kept = rounds.outcome(slot)
        errors.append(calibration_error(survival[offered, slot], kept[offered]))
        weights.append(int(offered.sum()))
    total = sum(weights)
    mean = sum(e * w for e, w in zip(errors, weights, strict=True)) / max(total, 1)
    return mean, errors


def identity(block_size: int) -> Tensor:
    """Return the scaling [G, 2] that changes nothing."""
    return torch.tensor([[1.0, 0.0]]).repeat(block_size, 1)


def fit(rounds: Rounds) -> Tensor:
    """Return a temperature and an offset per slot, [G, 2], fitted one slot after the other."""
    scaling = identity(rounds.logits.shape[1])
    for slot in range(len(scaling)):
        offered, kept = rounds.outcome(slot)
        logits, kept = rounds.logits[offered, slot], kept[offered]
        before = rounds.survival(scaling)[offered, slot - 1] if slot else torch.ones(len(logits))
        # Among equals the one nearest to leaving things alone.
        _, _, temperature, offset = min(
            (
                calibration_error(before * (logits / temperature + offset).sigmoid(), kept),
                abs(math.log(temperature)) + abs(offset),
                temperature,
                offset,
            )
            for temperature in TEMPERATURE_GRID.tolist()
            for offset in OFFSET_GRID.tolist()
        )
        scaling[slot] = torch.tensor([temperature, offset])
    return scaling


def calibrate(llm: LLM, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> dict[str, Any]:
    """Fit both regimes; return scalings, and errors before and after on the other half."""
    result: dict[str, Any] = {}
    for regime, temperature in REGIME_TEMPERATURES.items():
        params = [SamplingParams(temperature=temperature, max_tokens=max_tokens) for _ in prompts]
        rounds = collect(llm, prompts, params)
        first_half = rounds.request % 2 == 0
        scaling = fit(rounds.select(first_half))
        test = rounds.select(~first_half)
        result[regime] = {
            "scaling": [[round(each, 4) for each in pair] for pair in scaling.tolist()],
            "rounds": len(rounds.request),
            "error_before": survival_error(test, identity(len(scaling)))[0],
            "error_after": survival_error(test, scaling)[0],
        }
    return result


def store(folder: Path, result: dict[str, Any]) -> None:
    """Write the scalings beside the drafter's config, where they are applied at load."""
    stored = {regime: own["scaling"] for regime, own in result.items()}
    (folder / CALIBRATION).write_text(json.dumps(stored) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="target: folder or Hugging Face id")
    parser.add_argument("--draft", required=True, help="drafter: a folder, which is written to")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, held out")
    parser.add_argument("--limit", type=int, help="use so many prompts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(argv)
    folder = resolve_model(args.draft)
    llm = LLM(args.model, draft=str(folder), speculator="dspark", **options_of(args))
    prompts = prompt_ids(args.model, args.prompts)[: args.limit]
    result = calibrate(llm, prompts, max_tokens=args.max_tokens)
    store(folder, result)
    print(f"{'regime':<8} {'rounds':>6} {'before':>7} {'after':>7}  temperature and offset by slot")
    for regime, own in result.items():
        listed = " ".join(f"{pair[0]:.2f}{pair[1]:+.2f}" for pair in own["scaling"])
        before, after = own["error_before"], own["error_after"]
        print(f"{regime:<8} {own['rounds']:>6} {before:>7.2%} {after:>7.2%}  {listed}")
    print(json.dumps(provenance() | {"calibration": result}))


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return engine options."""
    return {"max_num_seqs": 64, "device": args.device, "dtype": args.dtype}


if __name__ == "__main__":
    main()
