"""What every engine of a comparison is asked: prompts as token ids, and when to stop."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from ab_job import Job
from gsm8k import Problem, is_right, prompt_ids, read_problems
from shapes import write_shapes

from nanospec.config import EMBEDDED_PAIR, ModelConfig
from nanospec.models.dspark import DSparkConfig
from nanospec.models.loader import resolve_model
from nanospec.text import Tokenizer

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
_SLACK = 64  # tokens of context beside prompt and output, so that drafts fit to the end


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of every engine."""

    prompts: list[list[int]]
    problems: list[Problem] | None  # None where answers mean nothing
    tokenizer: Tokenizer | None
    base: Job  # what all jobs share

    @property
    def is_right(self) -> Callable[[int, str], bool] | None:
        """What judges the text of a prompt's output, None where there is nothing to judge."""
        problems = self.problems
        if problems is None:
            return None
        return lambda index, text: is_right(text, problems[index])


def prepare(args: argparse.Namespace, folder: Path) -> Task:
    """Find the model, make the prompts.

    Raises:
        NanospecError: the model or the data cannot be used.
    """
    model, draft, load_format = args.model, args.draft, args.load_format
    if args.shapes is not None:
        model, draft = map(str, write_shapes(args.shapes, folder / "shapes"))
        load_format = "dummy"
    elif model is None:
        model, draft = (str(EMBEDDED_PAIR / name) for name in ("target", "drafter"))
    target = resolve_model(model)
    config = ModelConfig.from_folder(target)
    tokenizer = Tokenizer.load(target)
    is_void = load_format == "dummy" or args.synthetic_acceptance is not None
    problems = None
    if tokenizer is None:
        prompts = _random_prompts(args, config.vocab_size)
    else:
        own = "word_problems_heldout" if args.model is None else "gsm8k_20"
        problems = read_problems(args.data or DATA / f"{own}.jsonl", args.limit)
        prompts = [prompt_ids(tokenizer, problem.question) for problem in problems]
    longest = max(map(len, prompts)) + args.max_tokens + _SLACK
    block = 7 if draft is None else DSparkConfig.from_folder(resolve_model(draft)).block_size
    base = Job(
        engine="",
        model=model,
        draft=draft,
        num_draft=args.num_draft or block,
        dtype=_dtype(args.dtype, config.dtype),
        load_format=load_format,
        has_tokenizer=tokenizer is not None,
        max_model_len=min(longest, config.max_position_embeddings),
        cost_table=args.cost_table,
        synthetic_acceptance=args.synthetic_acceptance,
        url=args.engine_url,
        prompts=prompts,
        max_tokens=args.max_tokens,
        stop_ids=[] if is_void else _stop_ids(config, tokenizer),
        temperature=args.temperature,
        loads=[
            (load, min(len(prompts), args.prompts_per_slot * load or len(prompts)))
            for load in args.concurrency
        ],
    )
    return Task(prompts, None if is_void else problems, tokenizer, base)


def _random_prompts(args: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    shape = (args.limit, args.prompt_tokens)
    generator = torch.Generator().manual_seed(args.seed)
    found: list[list[int]] = torch.randint(vocab_size, shape, generator=generator).tolist()
    return found


def _dtype(wanted: str, stored: str) -> str:
    """Return what both engines run in; each would cast float32 as it likes."""
    if wanted == "auto" and torch.cuda.is_available():
        return "bfloat16" if stored == "float32" else stored
    return wanted


def _stop_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    found = list(config.eos_token_ids)
    if not found and tokenizer is not None and tokenizer.eos_token_id is not None:
        found = [tokenizer.eos_token_id]
    return [token for token in found if token < config.vocab_size]
