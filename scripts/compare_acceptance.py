#!/usr/bin/env python3
"""Compare the two lossless acceptances on real text: rejection, and noise shared with the target.

Both leave the output's law alone. Rejection accepts a sampled draft with probability
sum(min(p, q)), the most that is possible; shared noise accepts where two draws from the same noise
agree, which is a little less likely, but makes the output that of plain decoding, token for token.

A drafter is any model of the same vocabulary; --drop-layers makes one by leaving layers out of the
target.

Example:
    python scripts/compare_acceptance.py --model models/smollm2 --drop-layers 12,16,20 \\
        --prompts tests/data/gsm8k_20.jsonl --temperatures 0.5,0.7,1.0
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file
from tqdm import tqdm

from nanospec import LLM, SamplingParams
from nanospec.models.loader import resolve_model
from nanospec.prompts import read_prompts
from nanospec.stats import Stats

sys.path.insert(0, str(Path(__file__).resolve().parent))
from provenance import provenance


def main() -> None:
    """Run the comparison; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="target: folder or Hugging Face id")
    drafter = parser.add_mutually_exclusive_group(required=True)
    drafter.add_argument("--draft", help="drafter: folder or Hugging Face id")
    drafter.add_argument(
        "--drop-layers", help="make the drafter: layers of the target to leave out"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--temperatures", default="0.5,0.7,1.0")
    parser.add_argument("--max-draft-len", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2, help="seeds per prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        draft = args.draft or str(drop_layers(args.model, args.drop_layers, Path(folder)))
        results = compare(args, draft)
    print(f"{'T':>4} {'acceptance':<13} {'length':>6}  rate by depth")
    for row in results:
        rates = " ".join(f"{rate:.3f}" for rate in row["rates"])
        print(f"{row['temperature']:>4} {row['acceptance']:<13} {row['length']:>6.3f}  {rates}")
    print(json.dumps(provenance() | {"results": results}))


def compare(args: argparse.Namespace, draft: str) -> list[dict[str, object]]:
    """Return acceptance by temperature and rule; all prompts run together, with the same seeds."""
    questions = [conversation.turns[0] for conversation in read_prompts(args.prompts)]
    engines = {
        name: LLM(
            args.model,
            draft=draft,
            acceptance=name,
            max_draft_len=args.max_draft_len,
            max_model_len=1024,
            device=args.device,
            dtype=args.dtype,
        )
        for name in ("rejection", "shared-noise")
    }
    cases = [(float(t), name) for t in args.temperatures.split(",") for name in engines]
    results: list[dict[str, object]] = []
    for temperature, name in tqdm(cases, unit="case"):
        total = Stats()
        for repeat in range(args.repeats):
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=args.max_tokens,
                    seed=1000 * repeat + index,
                )
                for index in range(len(questions))
            ]
            messages = [[{"role": "user", "content": question}] for question in questions]
            for output in engines[name].chat(messages, params):
                total.add(output.stats)
        results.append(
            {
                "temperature": temperature,
                "acceptance": name,
                "length": total.acceptance_length,
                "rounds": total.rounds,
                "rates": total.acceptance_rates,
            }
        )
    return results


def drop_layers(model: str, layers: str, folder: Path) -> Path:
    """Write a copy of a model without some of its layers."""
    source = resolve_model(model)
    dropped = {int(layer) for layer in layers.split(",")}
    config = json.loads((source / "config.json").read_text())
    kept = [i for i in range(config["num_hidden_layers"]) if i not in dropped]
    renamed = {old: new for new, old in enumerate(kept)}
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] == "layers":
            if int(parts[2]) in dropped:
                continue
            parts[2] = str(renamed[int(parts[2])])
        tensors[".".join(parts)] = tensor
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(kept)}))
    shutil.copy(source / "tokenizer.json", folder / "tokenizer.json")
    return folder


if __name__ == "__main__":
    main()
