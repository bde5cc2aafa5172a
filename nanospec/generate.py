"""Command line: answer one prompt, or a file of prompts.

    python -m nanospec.generate "Tom has 3 apples and buys 4 more. How many does he have now?"
    python -m nanospec.generate --model MODEL --prompts in.jsonl --output out.jsonl

stdout carries the result only; logs, progress and statistics go to stderr. Bad input is one line on
stderr and exit code 2.
"""

import argparse
import gc
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from nanospec import config as choices
from nanospec.config import EngineConfig
from nanospec.errors import ConfigError, NanospecError
from nanospec.llm import LLM, old_objects_left_alone, output_of
from nanospec.params import SamplingParams
from nanospec.prompts import Conversation, finished_rows, read_prompts
from nanospec.stats import Stats
from nanospec.trace import Tracer
from nanospec.types import Request

# Command-line options that are fields of SamplingParams.
_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("stop", "ignore_eos"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = _parser().parse_args(argv)
    if sys.stdout is None:
        print("nanospec: error: stdout is closed; redirect it to /dev/null", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale says: models speak Unicode
    level = logging.INFO if args.verbose else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=level, format="%(name)s: %(message)s")
    try:
        return _run(args)
    except NanospecError as error:
        print(f"nanospec: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("nanospec: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        # Perhaps stdout is full, or its reader gone: keep Python from flushing it again at exit.
        with suppress(io.UnsupportedOperation):  # no file below, as under a test's capture
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 1
        print(f"nanospec: error: {error}", file=sys.stderr)
        return 2


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"nanospec: error: {message}; see --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m nanospec.generate",
        description="Generate text for one prompt or for a file of prompts.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the prompt; or use --prompts")
    add("--prompts", type=Path, metavar="FILE", help="JSON lines with prompt, question or turns")
    add("--output", type=Path, metavar="FILE", help="JSON lines to write, as rows are finished")
    add("--resume", action="store_true", help="go on with the rows that --output lacks")
    add("--json", action="store_true", help="print one JSON document")
    add("--stats", action="store_true", help="print acceptance by depth, and what steps did")
    add(
        "--trace",
        nargs="?",
        const="",
        metavar="FILE",
        help="draw every round on stderr, or write it to FILE as JSON lines",
    )
    add("--verbose", action="store_true", help="log loading and sizing to stderr")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="use the chat template (default: if the model has one)",
    )
    _add_sampling_options(parser.add_argument_group("sampling"))
    _add_engine_options(parser.add_argument_group("engine"))
    return parser


def _add_sampling_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--max-tokens", type=int, default=256, help="most output tokens")
    add("--min-tokens", type=int, default=0, help="no stop before so many output tokens")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 keeps all")
    add("--top-p", type=float, default=1.0, help="keep the fewest tokens that reach this mass")
    add("--min-p", type=float, default=0.0, help="least probability, relative to the largest")
    add("--seed", type=int, help="of the random numbers; row i of a file uses seed + i")
    add("--stop", action="append", metavar="TEXT", help="text that ends the output")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def _add_engine_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--model", help="folder or Hugging Face id (default: a toy for word problems)")
    add("--draft", help="drafter: folder or Hugging Face id")
    add(
        "--speculator",
        default="auto",
        help="auto, none, ngram, trie, draft, dspark, dspark-tree, or your own as module:Class",
    )
    add(
        "--max-draft-len",
        type=int,
        help="draft rows of one request at most (default: 7, a block, or a tree of 16)",
    )
    add(
        "--acceptance",
        default="auto",
        choices=choices.ACCEPTANCES,
        help="auto: shared-noise for seeded requests, rejection for others",
    )
    add("--adaptive", default="off", help="auto, threshold:P or schedule:[[from, to, drafts], ..]")
    add("--cost-table", metavar="FILE", help="measured costs, for --adaptive auto")
    add("--dtype", default="auto", choices=choices.DTYPES, help="auto: the checkpoint's")
    add("--device", default="auto", choices=choices.DEVICES, help="auto: cuda where there is one")
    add("--load-format", default="auto", choices=choices.LOAD_FORMATS, help="dummy: random weights")
    add("--attention", default="auto", choices=choices.ATTENTION_BACKENDS, help="backend")
    add("--run-ahead", default="auto", choices=choices.RUN_AHEADS, help="auto: on a GPU")
    add(
        "--max-graph-rows",
        type=int,
        help="of CUDA graphs; 0: none (default: plans, short prompts and full forwards)",
    )
    add("--page-size", type=int, default=16, help="tokens per KV page")
    add("--max-model-len", type=int, help="tokens of prompt and output (default: the model's)")
    add("--max-num-seqs", type=int, default=256, help="requests that may run at once")
    add(
        "--max-num-batched-tokens",
        type=int,
        help="rows of one forward (default: of all plans, at most 4096, and 2048 of prompts)",
    )
    add("--kv-cache-gib", type=float, help="GiB (default: what is free; on a CPU at most 4)")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of GPU memory to use")
    add(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the cache of equal prefixes",
    )


def _run(args: argparse.Namespace) -> int:
    if (args.prompt is None) == (args.prompts is None):
        hint = "; a word right after --trace is its FILE" if args.trace else ""
        raise ConfigError(f"pass either a prompt or --prompts FILE{hint}")
    if args.resume and args.output is None:
        raise ConfigError("--resume needs --output FILE")
    if args.output is not None and args.prompts is None:
        raise ConfigError("--output needs --prompts FILE")
    if args.trace and not Path(args.trace).parent.is_dir():
        raise ConfigError(f"{Path(args.trace).parent} is no folder; --trace cannot be written")
    params = _sampling_params(args)
    engine_options = {
        each.name: getattr(args, each.name)
        for each in fields(EngineConfig)
        if each.name != "seed"  # here it is the requests' own, not that of the engine
    }
    EngineConfig.from_options(engine_options)  # options are wrong sooner than a model is loaded
    conversations = _read_conversations(args)
    rows: dict[int, dict[str, Any]] = {}
    if args.output is not None:
        rows = finished_rows(args.output, conversations, _run_options(args), resume=args.resume)
    todo = [each for each in conversations if each.index not in rows]
    if args.model is None:
        # On a CPU more would wait for each other in so small a model.
        torch.set_num_threads(min(2, torch.get_num_threads()))
    llm = LLM(**engine_options)
    gc.collect()  # what loading has left
    with _tracing(args, llm), old_objects_left_alone():
        if args.prompts is None:
            return _answer(args, llm, params, todo[0])
        return _answer_file(args, llm, params, todo, rows)


def _run_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a row's text depends on; a run is resumed with the same."""
    return {name: getattr(args, name) for name in ("model", "chat", *_SAMPLING)}


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(**{name: getattr(args, name) for name in _SAMPLING})


def _read_conversations(args: argparse.Namespace) -> list[Conversation]:
    if args.prompts is not None:
        return read_prompts(args.prompts)
    if not args.prompt.strip():
        raise ConfigError("the prompt is empty")
    return [Conversation(index=0, source=args.prompt, turns=[args.prompt])]


@contextmanager
def _tracing(args: argparse.Namespace, llm: LLM) -> Iterator[None]:
    """Write every round to stderr or to a file, where --trace asks for it."""
    if args.trace is None:
        yield
    elif args.trace == "":
        colour = sys.stderr.isatty()
        llm.engine.observers.append(Tracer(sys.stderr, llm.tokenizer, colour=colour))
        yield
    else:
        with Path(args.trace).open("w", encoding="utf-8") as file:
            llm.engine.observers.append(Tracer(file, llm.tokenizer, as_data=True))
            yield


def _answer(
    args: argparse.Namespace, llm: LLM, params: SamplingParams, conversation: Conversation
) -> int:
    """Answer the one prompt of the command line, streaming unless JSON is wanted."""
    request = llm.engine.add(_next_prompt(args, llm, conversation), params)
    while not request.is_finished:
        llm.engine.step()
        if not args.json and args.trace != "":  # a drawing is not interrupted by text
            sys.stdout.write(request.text.take())
            sys.stdout.flush()
    if args.json:
        print(json.dumps(_as_row(args.prompt, request), ensure_ascii=False), flush=True)
    else:
        print(request.text.take(), flush=True)
    if args.stats or not args.json:
        print(_summary(request.stats, table=args.stats), file=sys.stderr)
    if args.stats:
        print(llm.engine.step_stats.summary(), file=sys.stderr)
    return 0


def _answer_file(
    args: argparse.Namespace,
    llm: LLM,
    params: SamplingParams,
    todo: list[Conversation],
    rows: dict[int, dict[str, Any]],
) -> int:
    """Answer the rows of a file that are left; each is written once its last turn is answered."""
    prompts = [_next_prompt(args, llm, each) for each in todo]
    own = [_with_own_seed(params, each.index) for each in todo]
    for conversation, prompt, each in zip(todo, prompts, own, strict=True):
        try:
            llm.engine.check(prompt, each)
        except NanospecError as error:
            raise ConfigError(f"{args.prompts}, row {conversation.index + 1}: {error}") from error
    running = {llm.engine.add(p, o): c for c, p, o in zip(todo, prompts, own, strict=True)}
    total, failed = Stats(), 0
    started = time.perf_counter()
    with tqdm(total=len(todo), unit="row", file=sys.stderr) as progress:
        for conversation in _finished(args, llm, running):
            for reply in conversation.replies:
                total.add(reply.stats)
            row = _conversation_row(conversation) | {"run": _run_options(args)}
            rows[conversation.index] = row
            failed += "error" in row
            _write_row(args, row)
            progress.update()
    total.seconds = time.perf_counter() - started
    if args.json:
        document = {
            "stats": total.as_dict(),
            "steps": llm.engine.step_stats.as_dict(),
            "outputs": [rows[index] for index in sorted(rows)],
        }
        print(json.dumps(document, ensure_ascii=False), flush=True)
    print(_summary(total, table=args.stats), file=sys.stderr)
    if args.stats:
        print(llm.engine.step_stats.summary(), file=sys.stderr)
    if failed:
        print(f"nanospec: {failed} rows ended early, see their field error", file=sys.stderr)
    return 1 if failed else 0


def _finished(
    args: argparse.Namespace, llm: LLM, running: dict[Request, Conversation]
) -> Iterator[Conversation]:
    """Advance all conversations and yield each that ends."""
    while running:
        for request in llm.engine.step():
            if not request.is_finished:
                continue
            conversation = running.pop(request)
            conversation.replies.append(request)
            if len(conversation.replies) < len(conversation.turns):
                try:
                    prompt = _next_prompt(args, llm, conversation)
                    running[llm.engine.add(prompt, request.params)] = conversation
                    continue
                except NanospecError as error:  # say, the dialogue has outgrown the context
                    conversation.error = str(error)
            yield conversation


def _next_prompt(args: argparse.Namespace, llm: LLM, conversation: Conversation) -> list[int]:
    """Return the token ids that ask for the next reply of a conversation."""
    turn = conversation.turns[len(conversation.replies)]
    has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    wants_chat = has_template if args.chat is None else args.chat
    if not isinstance(turn, str) or (not wants_chat and len(conversation.turns) == 1):
        return llm.encode(turn)
    if not wants_chat:
        row = conversation.index + 1
        raise ConfigError(f"row {row} has several turns, which needs a chat template (--chat)")
    if conversation.replies:
        reply = conversation.replies[-1].text.text
        conversation.messages.append({"role": "assistant", "content": reply})
    conversation.messages.append({"role": "user", "content": turn})
    return llm.encode_chat(conversation.messages)


def _with_own_seed(params: SamplingParams, index: int) -> SamplingParams:
    return params if params.seed is None else replace(params, seed=params.seed + index)


def _write_row(args: argparse.Namespace, row: dict[str, Any]) -> None:
    line = json.dumps(row, ensure_ascii=False)
    if args.output is not None:
        with args.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    elif not args.json:
        print(line, flush=True)


def _conversation_row(conversation: Conversation) -> dict[str, Any]:
    replies = conversation.replies
    row = {"index": conversation.index} | _as_row(conversation.source, replies[-1])
    if len(conversation.turns) > 1:
        row["replies"] = [reply.text.text for reply in replies]
        total = Stats(seconds=sum(reply.stats.seconds for reply in replies))
        for reply in replies:
            total.add(reply.stats)
        row["stats"] = total.as_dict()
    if conversation.error is not None:
        row["error"] = conversation.error
    return row


def _as_row(source: Any, request: Request) -> dict[str, Any]:
    output = output_of(request)
    completion = output.outputs[0]
    return {
        "prompt": source,
        "prompt_token_ids": output.prompt_token_ids,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stats": output.stats.as_dict(),
    }


def _summary(stats: Stats, *, table: bool) -> str:
    lines = [
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} tokens/s), "
        f"{stats.rounds} rounds, acceptance length {stats.acceptance_length:.2f}, "
        f"{stats.drafted} drafted / {stats.verified} verified / {stats.accepted} accepted"
    ]
    if table and stats.offered:
        lines.append("depth  verified  accepted   rate")
        rows = zip(stats.offered, stats.kept, stats.acceptance_rates, strict=True)
        for depth, (offered, kept, rate) in enumerate(rows, start=1):
            lines.append(f"{depth:>5}  {offered:>8}  {kept:>8}  {rate:>5.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
