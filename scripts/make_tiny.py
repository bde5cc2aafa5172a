"""Make the embedded toy pair: a small Qwen3 that answers word problems, and what drafts for it.

Stages, each skipped where its result exists and resumed where it was cut off by `--minutes`:

    data       tokenizer, configs, held-out problems      DIR/target, DIR/*_heldout.jsonl
    target     next-token training on `word_problems.py`  DIR/target, DIR/target_report.json
    drafter    `train_dspark.py` on the target's answers  DIR/drafter
    calibrate  `calibrate_confidence.py`                  DIR/drafter/confidence.json
    install    what the package ships                     nanospec/models/tiny, tests/data

A target of 7 million parameters needs about a billion tokens: minutes on a GPU, days on a CPU.

    python scripts/make_tiny.py --out DIR
    python scripts/make_tiny.py --out DIR --stage target --minutes 8

The last line of a stage is one JSON document.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import acceptance_study
import calibrate_confidence
import numpy as np
import torch
import torch.nn.functional as F
import train_dspark
from provenance import provenance
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from training import CausalAttention, cosine, save_checkpoint
from word_problems import Problem, problems

from nanospec.config import EMBEDDED_PAIR, ModelConfig
from nanospec.models.decoder import Decoder
from nanospec.models.dspark import CALIBRATION
from nanospec.models.loader import fill_random

VOCAB_SIZE = 2048  # rows of the embedding; the tokenizer may use fewer
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]  # ids 0, 1, 2, 3
END = SPECIAL.index("<|im_end|>")
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # what CHAT_TEMPLATE renders
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
SHIPPED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
SHIPPED += ("model.safetensors", CALIBRATION)
ROOT = Path(__file__).resolve().parents[1]
HELD_OUT = "word_problems_heldout.jsonl"
HELD_OUT_COUNT = 200  # problems to test on
MAX_ANSWER = 256  # tokens; the longest there is has about 130
# One layer and a short training: a drafter that knew all this text by heart would leave confidences
# and trees nothing to do. A CPU trains it in minutes.
DRAFTER = "--layers 1 --taps 1,3,5 --markov-rank 32 --samples 2 --temperatures 0,1"
DRAFTER += f" --max-tokens {MAX_ANSWER} --max-length 512 --batch 64 --anchors 48 --lr 2e-3 --bf16"
QUESTION_WEIGHT = 0.1  # of a question token's loss; an answer token's is 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """How much of everything."""

    seed: int = 0
    steps: int = 8000  # of the learning-rate schedule, over all calls
    minutes: float | None = None  # after which a call saves its state and ends
    tokenizer_problems: int = 30_000
    problems: int = 2_000_000  # to train on
    rows: int = 1280  # problems a step, about 128 thousand tokens
    micro_batches: int = 2  # a step's rows, sorted by length, run in so many parts
    learning_rate: float = 2e-3
    warmup: int = 200  # steps
    evaluate_every: int = 1000  # steps
    drafter_problems: int = 4000
    drafter_steps: tuple[int, ...] = (1000, 2000)  # the learning rate falls to 0 at each
    calibration_problems: int = 2000


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised problems, end to end. Where they are is known to the host, so nothing waits."""

    tokens: Tensor  # [N] int16
    starts: Tensor  # [P] int64 host, of each problem in `tokens`
    lens: Tensor  # [P] int64 host, tokens of each problem
    prompts: Tensor  # [P] int64 host, tokens of each problem's prompt

    def __len__(self) -> int:
        return len(self.lens)

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids [B, S] int64 of problems [B] (host), and which tokens to predict.

        Returns:
            Ids, padded with 0 at the right to a multiple of 8; and loss weights [B, S] fp32: 0 for
            the first token and padding, `QUESTION_WEIGHT` for the prompt, 1 for the answer.
        """
        device = self.tokens.device
        columns = torch.arange(-(-int(self.lens[rows].max()) // 8) * 8, device=device)
        starts, lens, prompts = (
            each[rows, None].to(device, non_blocking=True)
            for each in (self.starts, self.lens, self.prompts)
        )
        inside = columns < lens
        ids = self.tokens[(starts + columns) * inside].long() * inside
        weights = torch.where(columns < prompts, QUESTION_WEIGHT, 1.0) * inside * (columns > 0)
        return ids, weights


def make_data(out: Path, recipe: Recipe) -> bool:
    """Write tokenizer, configs and held-out problems; see the module docstring."""
    folder = out / "target"
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(recipe).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", {"eos_token_id": END, "pad_token_id": 0})
    _write_json(folder / "config.json", CONFIG)
    _write_problems(out / HELD_OUT, held_out_problems(HELD_OUT_COUNT))
    return True


def held_out_problems(count: int, skip: int = 0) -> list[Problem]:
    """Return held-out problems, all different, behind the first `skip` of them."""
    distinct: dict[str, Problem] = {}
    stream = problems(0, held_out=True)
    while len(distinct) < skip + count:
        problem = next(stream)
        distinct.setdefault(problem.question, problem)
    return list(distinct.values())[skip:]


def _write_problems(path: Path, chosen: Sequence[Problem]) -> None:
    rows = ({"question": p.question, "answer": p.answer, "template": p.template} for p in chosen)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train a byte-level BPE in which every digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(problems(recipe.seed, held_out=False), recipe.tokenizer_problems)
    texts = (f"user\n{p.question}\nassistant\n{p.answer}" for p in sample)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_target(out: Path, recipe: Recipe) -> bool:
    """Train the target, or go on with it; see the module docstring."""
    limit = float("inf") if recipe.minutes is None else 60 * recipe.minutes
    deadline = time.monotonic() + limit
    folder = out / "target"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = load_corpus(out, recipe, device)
    tests = {
        "training": _take(recipe.seed + 1, HELD_OUT_COUNT),
        "held_out": held_out_problems(HELD_OUT_COUNT),
    }
    encoded = {name: _corpus(_tokenise(folder, test), device) for name, test in tests.items()}
    config = ModelConfig.from_folder(folder)
    trainer = Trainer(config, recipe, device)
    state = out / "target_state.pt"
    if state.exists():
        trainer.load(state)
    while trainer.step < recipe.steps and time.monotonic() < deadline:
        trainer.advance(corpus)
        if trainer.step % 100 == 0:
            print(trainer.progress(), flush=True)
        if trainer.step % recipe.evaluate_every == 0 or trainer.step == recipe.steps:
            shares = {name: round(trainer.exact(each), 3) for name, each in encoded.items()}
            print(f"answers exact to the letter: {shares}", flush=True)
            trainer.save(state)
    trainer.save(state)
    save_checkpoint(folder, trainer.decoder, config, prefix="model.")
    if trainer.step < recipe.steps:
        print(f"stopped at step {trainer.step}; run again to go on", flush=True)
        return False
    report = trainer.report()
    report |= {f"exact_match_{name}": exact_match(folder, test) for name, test in tests.items()}
    report |= provenance()
    _write_json(out / "target_report.json", report)
    print(json.dumps(report))
    return True


class Trainer:
    """A decoder in training.

    Invariant: what it becomes follows from recipe and corpus, however often it is saved and loaded.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, device: torch.device):
        self.step = 0
        self.decoder = Decoder(config, torch.float32, device)
        self._recipe = recipe
        self._seconds = 0.0
        self._tokens = 0
        self._loss = torch.zeros((), device=device)  # running mean over about 50 steps
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))  # an epoch and its rows
        fill_random(self.decoder, recipe.seed)
        residual = [p for name, p in self.decoder.named_parameters() if _ends_branch(name)]
        for parameter in residual:
            parameter.div_(len(residual) ** 0.5)
        self.decoder.requires_grad_(True)
        parameters = list(self.decoder.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda"
        )

    def advance(self, corpus: Corpus) -> None:
        """Take one step."""
        recipe, start = self._recipe, time.monotonic()
        factor = cosine(self.step, recipe.steps, recipe.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * factor
        rows = self._rows(corpus)
        lens = corpus.lens[rows]
        parts = [corpus.padded(part) for part in rows[lens.argsort()].chunk(recipe.micro_batches)]
        total = sum(weights.sum() for _, weights in parts)
        loss = torch.zeros_like(self._loss)
        for ids, weights in parts:
            scores = self._losses(ids)
            part_loss = (scores * weights[:, 1:]).sum() / total
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += part_loss.detach()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._loss = loss if self.step == 0 else self._loss.lerp(loss, 0.02)
        self._tokens += int(lens.sum())
        self.step += 1
        self._seconds += time.monotonic() - start

    def exact(self, corpus: Corpus) -> float:
        """Return the share of problems of whose answer every token is the likeliest one.

        Greedy decoding would write exactly these answers, so this is its exact match, or less.
        """
        ids, weights = corpus.padded(torch.arange(len(corpus)))
        with torch.no_grad():
            right = self._logits(ids).argmax(-1) == ids[:, 1:]
        return float((right | (weights[:, 1:] < 1)).all(dim=1).float().mean())

    def save(self, path: Path) -> None:
        """Write all that `load` needs to go on."""
        state = {
            "step": self.step,
            "seconds": self._seconds,
            "tokens": self._tokens,
            "loss": self._loss,
            "decoder": self.decoder.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.rename(path)

    def load(self, path: Path) -> None:
        """Go on from a saved state."""
        state = torch.load(path, map_location=self.decoder.device)
        self.step, self._seconds = state["step"], state["seconds"]
        self._tokens, self._loss = state["tokens"], state["loss"]
        self.decoder.load_state_dict(state["decoder"])
        self._optimizer.load_state_dict(state["optimizer"])

    def progress(self) -> str:
        """Return a line for people. Synchronises."""
        speed = self._tokens / self._seconds
        return f"step {self.step:>6} loss {float(self._loss):.4f} {speed:,.0f} tokens/s"

    def report(self) -> dict[str, Any]:
        """Return what training took and came to. Synchronises."""
        return {
            "steps": self.step,
            "tokens": self._tokens,
            "seconds": round(self._seconds, 1),
            "loss": round(float(self._loss), 5),
            "parameters": sum(p.numel() for p in self.decoder.parameters()),
        }

    def _rows(self, corpus: Corpus) -> Tensor:
        """Return the problems [B] of this step; every epoch has its own order."""
        epoch, index = divmod(self.step, len(corpus) // self._recipe.rows)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._recipe.seed + epoch)
            self._order = (epoch, torch.randperm(len(corpus), generator=generator))
        return self._order[1][index * self._recipe.rows :][: self._recipe.rows]

    def _logits(self, ids: Tensor) -> Tensor:
        """Return [B, S - 1, V] for token ids [B, S]."""
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(batch)
        attention = CausalAttention(batch, length)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            hidden, _ = self.decoder(ids.flatten(), positions, attention)
            logits: Tensor = self.decoder.logits(hidden.view(batch, length, -1)[:, :-1])
        return logits

    def _losses(self, ids: Tensor) -> Tensor:
        """Return cross entropies [B, S - 1] of all tokens but the first."""
        logits = self._logits(ids).float().transpose(1, 2)
        return F.cross_entropy(logits, ids[:, 1:], reduction="none")


def _ends_branch(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def load_corpus(out: Path, recipe: Recipe, device: torch.device) -> Corpus:
    """Return the training problems, written once by all cores and kept in `DIR/corpus.npz`."""
    path = out / "corpus.npz"
    if not path.exists():
        start = time.monotonic()
        np.savez(path, *_generate(out / "target", recipe))
        print(f"{recipe.problems} problems in {time.monotonic() - start:.0f} s", flush=True)
    with np.load(path) as arrays:
        return _corpus([arrays[name] for name in arrays.files], device)


def _generate(folder: Path, recipe: Recipe) -> list[np.ndarray]:
    size = 20_000
    jobs = [
        (folder, recipe.seed + 1000 + index, min(size, recipe.problems - first))
        for index, first in enumerate(range(0, recipe.problems, size))
    ]
    if len(jobs) == 1:
        return list(_generate_part(jobs[0]))
    # Not forked: threads of the tokenizer would be missing in the copies.
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        parts = pool.map(_generate_part, jobs, chunksize=1)
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def _generate_part(job: tuple[Path, int, int]) -> tuple[np.ndarray, ...]:
    folder, seed, count = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use all cores
    return _tokenise(folder, _take(seed, count))


def _tokenise(folder: Path, chosen: Sequence[Problem]) -> tuple[np.ndarray, ...]:
    """Return all tokens, each problem's number of them, and that of its prompt; all int16."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = tokenizer.encode_batch_fast([PROMPT.format(p.question) for p in chosen])
    answers = tokenizer.encode_batch_fast([p.answer for p in chosen])
    rows = [[*p.ids, *a.ids, END] for p, a in zip(prompts, answers, strict=True)]
    tokens = np.fromiter(itertools.chain.from_iterable(rows), np.int16)
    lens = np.array([len(row) for row in rows], np.int16)
    return tokens, lens, np.array([len(p.ids) for p in prompts], np.int16)


def _corpus(arrays: Sequence[np.ndarray], device: torch.device) -> Corpus:
    tokens, lens, prompts = map(torch.from_numpy, arrays)
    lens = lens.long()
    return Corpus(tokens.to(device), lens.cumsum(0) - lens, lens, prompts.long())


def _take(seed: int, count: int) -> list[Problem]:
    return list(itertools.islice(problems(seed, held_out=False), count))


def exact_match(folder: Path, chosen: Sequence[Problem]) -> float:
    """Return the share of problems whose greedy answer by the engine ends in the right number."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(PROMPT.format(problem.question)).ids for problem in chosen]
    answers = [problem.answer for problem in chosen]
    return acceptance_study.exact_match(
        str(folder), prompts, answers, MAX_ANSWER, speculator="none", attention="torch"
    )


def train_drafter(out: Path, recipe: Recipe) -> bool:
    """Train the drafter on the target's answers to training problems, or go on with it."""
    questions = out / "questions.jsonl"
    if not questions.exists():
        _write_problems(questions, _take(recipe.seed + 2, recipe.drafter_problems))
    options = [*DRAFTER.split(), "--no-plot"]
    if recipe.minutes is not None:
        options += ["--minutes", str(recipe.minutes)]
    if torch.cuda.is_available():
        options += ["--processes", "8", "--kv-cache-gib", "2"]
    else:
        options += ["--processes", "2", "--kv-cache-gib", "1", "--max-num-seqs", "128"]
    where = ["--target", str(out / "target"), "--data", str(questions)]
    where += ["--out", str(out / "drafter"), "--seed", str(recipe.seed)]
    return all(
        train_dspark.main([*where, "--steps", str(steps), *options])
        for steps in recipe.drafter_steps
    )


def calibrate(out: Path, recipe: Recipe) -> bool:
    """Calibrate the drafter's confidences on held-out problems that nothing is tested on."""
    path = out / "word_problems_calibration.jsonl"
    _write_problems(path, held_out_problems(recipe.calibration_problems, skip=HELD_OUT_COUNT))
    calibrate_confidence.main(
        [
            *("--model", str(out / "target"), "--draft", str(out / "drafter")),
            *("--prompts", str(path), "--max-tokens", str(MAX_ANSWER)),
        ]
    )
    return True


def install(out: Path, recipe: Recipe) -> bool:
    """Copy what the package ships into the package, and the held-out problems to the tests."""
    del recipe
    for part in ("target", "drafter"):
        folder = EMBEDDED_PAIR / part
        folder.mkdir(parents=True, exist_ok=True)
        for path in (out / part).iterdir():
            if path.name in SHIPPED:
                shutil.copyfile(path, folder / path.name)
    shutil.copyfile(out / HELD_OUT, ROOT / "tests" / "data" / HELD_OUT)
    (out / "installed").touch()
    return True


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# Each with the file that shows it is done. A stage returns whether it came to its end.
STAGES: dict[str, tuple[Callable[[Path, Recipe], bool], str]] = {
    "data": (make_data, HELD_OUT),
    "target": (train_target, "target_report.json"),
    "drafter": (train_drafter, "drafter/report.json"),
    "calibrate": (calibrate, f"drafter/{CALIBRATION}"),
    "install": (install, "installed"),
}


def main(argv: Sequence[str] | None = None) -> None:
    default = Recipe()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--stage", choices=STAGES, help="only this one (default all, in order)")
    parser.add_argument("--minutes", type=float, help="wall-clock limit of a training stage")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.steps, help="of the target's training")
    args = parser.parse_args(argv)
    recipe = Recipe(seed=args.seed, steps=args.steps, minutes=args.minutes)
    for name, (stage, result) in STAGES.items():
        if args.stage not in (None, name):
            continue
        if (args.out / result).exists():
            print(f"{name}: {result} exists")
        elif not stage(args.out, recipe):
            return


if __name__ == "__main__":
    main()
