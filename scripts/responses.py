"""A target's own responses to a file of prompts: what a drafter is trained on."""

import json
import multiprocessing
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from nanospec import LLM, SamplingParams
from nanospec.models.loader import resolve_model
from nanospec.prompts import read_prompts
from nanospec.text import Tokenizer


def prompt_ids(model: str, path: Path) -> list[list[int]]:
    """Return the token ids of each row's first turn, through the chat template if there is one."""
    tokenizer = Tokenizer.load(resolve_model(model))
    found = []
    for conversation in read_prompts(path):
        turn = conversation.turns[0]
        if not isinstance(turn, str):
            found.append(turn)
            continue
        if tokenizer is None:
            sys.exit(f"{model} has no tokenizer.json, so {path} must hold token ids")
        if tokenizer.has_chat_template:
            found.append(tokenizer.chat_ids([{"role": "user", "content": turn}]))
        else:
            found.append(tokenizer.encode(turn))
    return found


def respond(
    folder: Path,
    model: str,
    prompts: Sequence[Sequence[int]],
    *,
    samples: int,
    temperatures: Sequence[float],
    processes: int = 1,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return `samples` responses to each prompt; what the folder already holds is not made again.

    What it holds counts if it is a response to the same prompt, made with the same parameters.

    Args:
        folder: holds one file of JSON lines per process; a killed run goes on from there.
        model: folder or Hugging Face id.
        prompts: token ids.
        samples: responses per prompt; the i-th is drawn at temperature `temperatures[i % n]`.
        temperatures: n of them.
        processes: that share the GPU; generation in one process waits mostly for its host.
        options: max_tokens and seed of the requests; the rest are of the engine.

    Returns:
        Rows with prompt (ids), output (ids, the end token included), temperature, key.
    """
    folder.mkdir(parents=True, exist_ok=True)
    how = f"{options['max_tokens']} tokens, seed {options['seed']}"
    wanted = {}
    for index, prompt in enumerate(prompts):
        for sample in range(samples):
            temperature = temperatures[sample % len(temperatures)]
            key = f"{index}, sample {sample} at {temperature}, {how}"
            wanted[key] = (list(prompt), temperature)
    done = _read(folder)
    todo = [
        (key, *made)
        for key, made in wanted.items()
        if key not in done or done[key]["prompt"] != made[0]
    ]
    shards = [todo[start::processes] for start in range(processes)]
    work = [(folder, number, model, shard, options) for number, shard in enumerate(shards) if shard]
    if len(work) == 1:
        _respond(*work[0])
    elif work:
        with multiprocessing.get_context("spawn").Pool(len(work)) as pool:
            pool.starmap(_respond_beside_others, work)
    done = _read(folder)
    return [done[key] for key in wanted]


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("responses-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the line a killed run was writing
            found[row["key"]] = row
    return found


def _respond_beside_others(*work: Any) -> None:
    torch.set_num_threads(1)
    _respond(*work)


def _respond(
    folder: Path,
    number: int,
    model: str,
    todo: Sequence[tuple[str, Sequence[int], float]],
    options: dict[str, Any],
) -> None:
    own = dict(options)
    max_tokens = own.pop("max_tokens")
    own.pop("seed")  # it is part of the keys
    engine = LLM(model, **own).engine
    requests = {}
    for key, prompt, temperature in todo:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=zlib.crc32(key.encode()),
        )
        requests[engine.add(list(prompt), params).request_id] = (key, temperature)
    path = folder / f"responses-{number:02}.jsonl"
    with path.open("a") as out, tqdm(total=len(todo), unit="response", position=number) as bar:
        out.write("\n")  # ends a line that a killed run left
        while engine.has_work:
            for request in engine.step():
                if request.is_finished:
                    key, temperature = requests.pop(request.request_id)
                    row = {
                        "key": key,
                        "temperature": temperature,
                        "prompt": request.prompt_token_ids,
                        "output": request.output_token_ids,
                    }
                    out.write(json.dumps(row) + "\n")
                    bar.update()
