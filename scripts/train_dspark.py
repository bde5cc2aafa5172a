#!/usr/bin/env python3
"""Train a DSpark drafter for a target, from the target's own responses to a file of prompts.

Three stages, each of which goes on where a killed or timed run stopped:
responses (nanospec generates them), training, and a report on prompts held out. --out then holds
the drafter in its released format, `report.json`, `losses.jsonl` and `loss.png`. With --minutes the
training stops after so long, to be continued by the same command.

Recipe: DSpark paper (arXiv:2607.05147): blocks at random anchors, teacher-forced, cross entropy,
total variation and confidence losses, weighted less the deeper the slot. Embedding and head are the
target's and stay frozen.

Example:
    python scripts/train_dspark.py --target models/smollm2 --mask-token-id 16 \\
        --data gsm8k_train.jsonl --samples 2 --steps 6000 --out models/smollm2-dspark
"""

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from nanospec.config import ModelConfig
from nanospec.models.decoder import Decoder
from nanospec.models.dspark import (
    ARCHITECTURE,
    CALIBRATION,
    MARKOV_HEADS,
    DSparkConfig,
    DSparkDrafter,
)
from nanospec.models.layers import Linear
from nanospec.models.loader import fill_random, load_decoder, resolve_model
from nanospec.text import read_json

sys.path.insert(0, str(Path(__file__).resolve().parent))
from acceptance_study import acceptance
from provenance import provenance
from responses import prompt_ids, respond
from training import BlockAttention, CausalAttention, cosine, save_checkpoint

LOSS_DECAY = 4.0  # slot k counts exp(-k / 4)
L1_WEIGHT, CONFIDENCE_WEIGHT = 0.9, 1.0
CE_WEIGHT, FIRST_CE_WEIGHT, FIRST_SHARE = 0.1, 1.0, 0.1
WARMUP = 100  # steps
SAVE_SECONDS = 120
LOG_STEPS = 20


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, padded to S tokens on the right."""

    token_ids: Tensor  # [B, S] int64
    is_output: Tensor  # [B, S] bool, tokens of the response

    def anchors(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw up to `count` roots per sequence, each in the response with a token after it.

        Returns:
            Positions [B, count] int64, and which of them are meant, [B, count] bool.
        """
        may = self.is_output.clone()
        may[:, :-1] &= self.is_output[:, 1:]
        may[:, -1] = False
        drawn = torch.rand(may.shape, generator=generator, device=may.device)
        count = min(count, may.shape[1])
        scores, anchors = drawn.masked_fill(~may, -1.0).topk(count, dim=1)
        return anchors, scores >= 0


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one batch, each a mean over slots by weight."""

    ce: Tensor
    l1: Tensor
    confidence: Tensor
    length: Tensor  # expected acceptance length at temperature 1

    def total(self, ce_weight: float) -> Tensor:
        """Return what is minimised."""
        return ce_weight * self.ce + L1_WEIGHT * self.l1 + CONFIDENCE_WEIGHT * self.confidence


def block_losses(
    drafter: DSparkDrafter, target: Decoder, batch: Batch, anchors: Tensor, is_meant: Tensor
) -> Losses:
    """Return the losses of the blocks at some anchors.

    Args:
        drafter: in training.
        target: frozen, of the same device.
        batch: B sequences.
        anchors: [B, N] positions of roots.
        is_meant: [B, N] bool; other blocks are padding.
    """
    config = drafter.config
    shape, num_slots = batch.token_ids.shape, config.block_size
    device = batch.token_ids.device
    at = torch.arange(shape[1], device=device).repeat(shape[0])
    with torch.no_grad():
        attention: Any = CausalAttention(*shape)
        hidden, features = target(batch.token_ids.flatten(), at, attention, config.target_layer_ids)
    context = drafter.context(features, at)
    slots = torch.arange(num_slots, device=device)
    places = anchors[..., None] + slots  # [B, N, G]
    known = places.clamp(max=shape[1] - 1).flatten(1)
    tokens = batch.token_ids.gather(1, known).flatten()  # before each slot's own
    after = (places + 1).clamp(max=shape[1] - 1).flatten(1)
    labels = batch.token_ids.gather(1, after).flatten()
    in_output = batch.is_output.gather(1, after).view_as(places) & (places + 1 < shape[1])
    counts = (in_output & is_meant[..., None]).long().cumprod(-1).view(-1, num_slots)  # [B * N, G]
    block_ids = tokens.view(-1, num_slots).clone()
    block_ids[:, 1:] = config.mask_token_id
    blocks: Any = BlockAttention(context, (shape[0], shape[1]), anchors, num_slots)
    drafted = drafter(block_ids.flatten(), places.flatten(), blocks)
    offsets = torch.arange(shape[0], device=device)[:, None] * shape[1]
    teacher = hidden[(known + offsets).flatten()]

    def slot_of(rows: Tensor, slot: int) -> Tensor:
        return rows.unflatten(0, (-1, num_slots))[:, slot]

    weight = torch.exp(-slots / LOSS_DECAY) * counts
    confidences = drafter.confidences(drafted, tokens)
    state = drafter.first_state(len(counts))
    sums = {name: torch.zeros((), device=device) for name in ("ce", "l1", "confidence")}
    accepted = []
    for slot in range(num_slots):
        own = slot_of(drafted, slot)
        logits, state = drafter.correct(drafter.base_logits(own), own, slot_of(tokens, slot), state)
        log_q = logits.log_softmax(-1)
        with torch.no_grad():
            p = target.logits(slot_of(teacher, slot)).float().softmax(-1)
        l1 = (log_q.exp() - p).abs().sum(-1)
        ce = F.nll_loss(log_q, slot_of(labels, slot), reduction="none")
        overlap = (1 - 0.5 * l1).clamp(0, 1).detach()
        accepted.append(overlap)
        sums["ce"] = sums["ce"] + (weight[:, slot] * ce).sum()
        sums["l1"] = sums["l1"] + (weight[:, slot] * l1).sum()
        if confidences is not None:
            confidence = slot_of(confidences, slot)
            bce = F.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
            sums["confidence"] = sums["confidence"] + (weight[:, slot] * bce).sum()
    total = weight.sum().clamp(min=1e-6)
    alive = (torch.stack(accepted, dim=1) * counts).cumprod(dim=1).sum(dim=1)
    length = 1 + (alive * counts[:, 0]).sum() / counts[:, 0].sum().clamp(min=1)
    return Losses(*(sums[name] / total for name in ("ce", "l1", "confidence")), length=length)


def batches(
    rows: Sequence[dict[str, Any]], args: argparse.Namespace, device: torch.device, first: int
) -> Iterator[Batch]:
    """Yield batches of similar lengths, epoch after epoch, from step `first` on.

    The same seed gives the same ones, whatever the first is.
    """
    texts = [(row["prompt"] + row["output"])[: args.max_length] for row in rows]
    starts = [len(row["prompt"]) for row in rows]
    usable = [
        index
        for index, (text, start) in enumerate(zip(texts, starts, strict=True))
        if len(text) >= start + 2
    ]
    if len(usable) < args.batch:
        sys.exit(f"{len(usable)} responses can be trained on; --batch {args.batch} needs more")
    epoch = 0
    while True:
        rng = random.Random(f"{args.seed}/{epoch}")
        order = rng.sample(usable, len(usable))
        groups = []
        for start in range(0, len(order), 32 * args.batch):
            part = sorted(order[start : start + 32 * args.batch], key=lambda i: len(texts[i]))
            groups += [part[i : i + args.batch] for i in range(0, len(part), args.batch)]
        groups = [group for group in groups if len(group) == args.batch]
        rng.shuffle(groups)
        for group in groups[first:]:
            yield collate([texts[i] for i in group], [starts[i] for i in group], device)
        first = max(first - len(groups), 0)
        epoch += 1


def collate(texts: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device) -> Batch:
    """Pad token ids on the right; everything from a text's start on is response."""
    width = -(-max(len(text) for text in texts) // 8) * 8
    token_ids = torch.zeros(len(texts), width, dtype=torch.int64)
    is_output = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        token_ids[row, : len(text)] = torch.tensor(text)
        is_output[row, start : len(text)] = True
    return Batch(token_ids.to(device), is_output.to(device))


def train(
    drafter: DSparkDrafter,
    target: Decoder,
    rows: Sequence[dict[str, Any]],
    held_out: Batch,
    args: argparse.Namespace,
) -> bool:
    """Train until `--steps`, or until `--minutes` are over; the state is kept in `--out`.

    Returns:
        Whether all steps are done.
    """
    device = held_out.token_ids.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    weights = [each for each in drafter.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=args.lr, weight_decay=0.0, fused=device.type == "cuda"
    )
    state, step, path = args.out / "state.pt", 0, args.out / "losses.jsonl"
    seconds = 0.0  # of the commands before
    if state.exists():
        saved = torch.load(state, map_location=device, weights_only=True)
        drafter.load_state_dict(saved["drafter"], strict=False)  # without the frozen tables
        optimizer.load_state_dict(saved["optimizer"])
        step, seconds = saved["step"], saved["seconds"]
    # A killed run may have logged steps that it did not save.
    path.write_text("".join(json.dumps(row) + "\n" for row in _curve(path) if row["step"] <= step))

    def save() -> None:
        own = {name: each for name, each in drafter.named_parameters() if each.requires_grad}
        spent = seconds + time.monotonic() - started
        saved = {"drafter": own, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(saved | {"seconds": spent}, state.with_suffix(".tmp"))
        state.with_suffix(".tmp").rename(state)

    started = saved_at = time.monotonic()
    stream = batches(rows, args, device, step)
    bar = tqdm(total=args.steps, initial=step, unit="step", mininterval=5)
    with path.open("a") as log, bar:
        while step < args.steps:
            if args.minutes is not None and time.monotonic() - started > 60 * args.minutes:
                break
            generator = torch.Generator(device).manual_seed(args.seed * 10**7 + step)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * cosine(step, args.steps, min(WARMUP, args.steps // 10))
            ce_weight = FIRST_CE_WEIGHT if step < FIRST_SHARE * args.steps else CE_WEIGHT
            batch = next(stream)
            with autocast:
                losses = block_losses(
                    drafter, target, batch, *batch.anchors(args.anchors, generator)
                )
            optimizer.zero_grad(set_to_none=True)
            losses.total(ce_weight).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            step += 1
            bar.update()
            if step % LOG_STEPS == 0 or step == args.steps:
                row = {"step": step} | _numbers(losses, ce_weight)
                if step % (10 * LOG_STEPS) == 0 or step == args.steps:
                    row["held_out_length"] = evaluate(drafter, target, held_out, args)
                bar.set_postfix({k: f"{row[k]:.3f}" for k in ("loss", "length")})
                log.write(json.dumps(row) + "\n")
                log.flush()
            if time.monotonic() - saved_at > SAVE_SECONDS:
                save()
                saved_at = time.monotonic()
    save()
    return step >= args.steps


def _curve(path: Path) -> list[dict[str, float]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


@torch.no_grad()
def evaluate(
    drafter: DSparkDrafter, target: Decoder, held_out: Batch, args: argparse.Namespace
) -> float:
    """Return the expected acceptance length on held-out text."""
    device = held_out.token_ids.device
    generator = torch.Generator(device).manual_seed(args.seed)
    with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
        anchors = held_out.anchors(args.anchors, generator)
        return float(block_losses(drafter, target, held_out, *anchors).length)


def _numbers(losses: Losses, ce_weight: float) -> dict[str, float]:
    return {
        "loss": float(losses.total(ce_weight).detach()),
        "ce": float(losses.ce.detach()),
        "l1": float(losses.l1.detach()),
        "confidence": float(losses.confidence.detach()),
        "length": float(losses.length),
    }


def drafter_config(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return `config.json` of a drafter for a target, in the released form."""
    hf = read_json(folder / "config.json")
    target = ModelConfig.from_folder(folder)
    taps = args.taps or spread_taps(target.num_layers, 3)
    if args.mask_token_id is None:
        args.mask_token_id = unused_token(folder, target.vocab_size)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_target_layers": target.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": {"rope_theta": target.rope.theta, "rope_type": "default"},
        "layer_types": ["full_attention"] * args.layers,
        "tie_word_embeddings": False,
        "bos_token_id": hf.get("bos_token_id"),
        "eos_token_id": hf.get("eos_token_id"),
        "block_size": args.block_size,
        "mask_token_id": args.mask_token_id,
        "target_layer_ids": taps,
        "num_anchors": args.anchors,
        "markov_rank": args.markov_rank,
        **({"markov_head_type": args.markov_head} if args.markov_rank else {}),
        "enable_confidence_head": True,
        "confidence_head_with_markov": args.markov_rank > 0,
    }


def spread_taps(num_layers: int, count: int) -> list[int]:
    """Return tapped layers as the releases have them: the second to the third last, even steps."""
    last = max(num_layers - 3, 1)
    steps = max(count - 1, 1)
    taps = {round(1 + i * (last - 1) / steps) for i in range(count)}
    return sorted({min(tap, num_layers - 2) for tap in taps})  # never after the last layer


def unused_token(folder: Path, vocab_size: int) -> int:
    """Return the first id behind the tokenizer's last, or the one of its `<|mask|>`."""
    tokenizer = read_json(folder / "tokenizer.json")
    added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens", [])}
    if "<|mask|>" in added:
        return int(added["<|mask|>"])
    last = max([*tokenizer["model"]["vocab"].values(), *added.values()])
    if last + 1 >= vocab_size:
        sys.exit(
            "every id of the vocabulary is a token; name one that never comes by --mask-token-id"
        )
    return int(last + 1)


def new_drafter(config: DSparkConfig, target: Decoder, seed: int) -> DSparkDrafter:
    """Return an untrained drafter in float32 beside a frozen target."""
    tables: dict[str, Linear] = {"embed_tokens": target.embed_tokens, "lm_head": target.lm_head}
    drafter = DSparkDrafter(config, torch.float32, target.device, **tables)
    fill_random(drafter, 1000 * seed, frozen=tables.values())
    for parameter in drafter.parameters():
        parameter.requires_grad_(True)
    for table in tables.values():
        table.requires_grad_(False)
    return drafter


def save(drafter: DSparkDrafter, config: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the drafter in its released format; embedding and head only on request."""
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / CALIBRATION).unlink(missing_ok=True)  # that of another training
    stored = torch.nn.Module()
    for name, part in drafter.named_children():
        if name not in ("embed_tokens", "lm_head"):
            stored.add_module(name, part)
    if args.store_embeddings:  # both, though they may be one table
        stored.add_module("embed_tokens", copy.deepcopy(drafter.embed_tokens))
        stored.add_module("lm_head", copy.deepcopy(drafter.lm_head))
    save_checkpoint(args.out, stored, drafter.config.layers, shard_mb=args.shard_mb)


def report(
    args: argparse.Namespace, prompts: Sequence[Sequence[int]], responses: dict[str, int]
) -> None:
    """Measure acceptance on held-out prompts, through nanospec; write report.json, loss.png.

    Args:
        args: of the command line.
        prompts: held out, as token ids.
        responses: how many there were to train on, and their tokens.
    """
    curve = _curve(args.out / "losses.jsonl")
    seconds = torch.load(args.out / "state.pt", weights_only=True)["seconds"]
    results = acceptance(
        args.target,
        str(args.out),
        prompts,
        speculators=[("dspark", args.block_size)],
        temperatures=[0.0, 1.0],
        max_tokens=args.max_tokens,
        device=args.device,
        max_model_len=args.max_length,
        max_num_seqs=64,
    )
    found = provenance() | responses
    found |= {"training_seconds": seconds, "acceptance": results, "curve": curve}
    (args.out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    for row in results:
        rates = " ".join(f"{rate:.3f}" for rate in row["rates"])
        print(f"T={row['temperature']:<4} {row['acceptance']:<13} {row['length']:.3f}  {rates}")
    if not args.no_plot:
        plot(args.out / "loss.png", curve)


def plot(path: Path, curve: Sequence[dict[str, float]]) -> None:
    """Draw the loss and the expected acceptance length by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    steps = [row["step"] for row in curve]
    for name in ("ce", "l1", "confidence"):
        left.plot(steps, [row[name] for row in curve], label=name, linewidth=0.8)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    right.plot(steps, [row["length"] for row in curve], label="training", linewidth=0.8)
    measured = [row for row in curve if "held_out_length" in row]
    right.plot(
        [row["step"] for row in measured],
        [row["held_out_length"] for row in measured],
        label="held out",
    )
    right.set(xlabel="step", ylabel="expected acceptance length, T=1")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> bool:
    """Run the stages; return whether the drafter is finished."""
    args = _parser().parse_args(argv)
    if not args.no_plot:
        try:
            import matplotlib  # noqa: F401 - asked for now, not after an hour
        except ImportError:
            sys.exit("loss.png needs matplotlib: pip install matplotlib, or pass --no-plot")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    if args.bf16 is None:
        args.bf16 = device.type == "cuda"
    folder = resolve_model(args.target)
    hf = drafter_config(folder, args)
    config, own = ModelConfig.from_folder(folder), DSparkConfig.from_hf(hf)
    own.check_target(config)
    held_out, prompts = split_prompts(args)
    options = {
        "max_tokens": args.max_tokens,
        "max_model_len": args.max_length,
        "max_num_seqs": args.max_num_seqs,
        "kv_cache_gib": args.kv_cache_gib,
        "seed": args.seed,
        "device": args.device,
    }
    rows = respond(
        args.out / "responses",
        args.target,
        prompts,
        samples=args.samples,
        temperatures=args.temperatures,
        processes=args.processes,
        **options,
    )
    held_rows = respond(
        args.out / "held-out", args.target, held_out, samples=1, temperatures=[1.0], **options
    )
    made = {"responses": len(rows), "response_tokens": sum(len(row["output"]) for row in rows)}
    print(f"{made['responses']} responses, {made['response_tokens']} tokens", flush=True)
    if args.responses_only:
        return False

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    target = load_decoder(folder, config, dtype=dtype, device=device).requires_grad_(False)
    drafter = new_drafter(own, target, args.seed)
    texts = [(row["prompt"] + row["output"])[: args.max_length] for row in held_rows[:64]]
    batch = collate(texts, [len(row["prompt"]) for row in held_rows[:64]], device)
    is_done = train(drafter, target, rows, batch, args)
    save(drafter, hf, args)
    if not is_done:
        print("stopped by --minutes; run the same command again to go on")
        return False
    del target, drafter
    report(args, held_out, made)
    return True


def split_prompts(args: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts to report on and prompts to train on; ones too long to answer are left out."""
    prompts = prompt_ids(args.target, args.data)
    usable = [prompt for prompt in prompts if len(prompt) <= args.max_length - 2]
    if len(usable) < len(prompts):
        print(f"{len(prompts) - len(usable)} prompts do not fit --max-length and are left out")
    random.Random(args.seed).shuffle(usable)
    held_out, rest = usable[: args.held_out], usable[args.held_out :][: args.limit]
    if args.held_out < 1 or not rest:
        sys.exit(
            f"--held-out {args.held_out} of {len(usable)} prompts leaves nothing to report on, or "
            f"nothing to train on"
        )
    return held_out, rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, help="folder or Hugging Face id")
    add("--data", type=Path, required=True, help="JSON lines of prompts")
    add("--out", type=Path, required=True, help="folder of the drafter and of what can be resumed")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--no-plot", action="store_true", help="write no loss.png")
    group = parser.add_argument_group("responses").add_argument
    group("--samples", type=int, default=1, help="responses per prompt")
    group("--temperatures", type=_floats, default=[1.0], help="of the samples, in turn")
    group("--max-tokens", type=int, default=256, help="of a response")
    group("--held-out", type=int, default=100, help="prompts kept for the report")
    group("--limit", type=int, help="train on so many prompts")
    group("--max-num-seqs", type=int, default=512, help="responses generated at once")
    group("--processes", type=int, default=1, help="that generate at the same time")
    group("--kv-cache-gib", type=float, help="of each process")
    group("--responses-only", action="store_true", help="stop after the first stage")
    group = parser.add_argument_group("drafter").add_argument
    group("--layers", type=int, default=2)
    group("--taps", type=_ints, help="target layers, e.g. 1,9,17 (default: three, evenly)")
    group("--block-size", type=int, default=7)
    group("--markov-rank", type=int, default=128)
    group("--markov-head", choices=MARKOV_HEADS, default="vanilla")
    group("--mask-token-id", type=int, help="default: <|mask|>, or the first id without a token")
    group = parser.add_argument_group("training").add_argument
    group("--steps", type=int, default=5000)
    group("--minutes", type=float, help="stop after so long; the same command goes on")
    group("--batch", type=int, default=64, help="sequences of a step")
    group("--anchors", type=int, default=64, help="blocks per sequence")
    group("--max-length", type=int, default=1024, help="tokens of prompt and response")
    group("--lr", type=float, default=1e-3)
    group(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="multiply matrices in bfloat16 (default: on a GPU)",
    )
    group("--shard-mb", type=float, help="largest weight file, 10**6 bytes")
    group("--store-embeddings", action="store_true", help="also store the target's tables")
    return parser


def _floats(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _ints(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
