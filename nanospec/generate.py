"""Command line: answer one prompt, or a file of prompts.

    python -m nanospec.generate --model MODEL "What is 17 * 24?"
    python -m nanospec.generate --model MODEL --prompts in.jsonl --output out.jsonl

stdout carries the result only; logs, progress and statistics go to stderr. Bad input is one line on
stderr and exit code 2.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from nanospec import config as choices
from nanospec.config import EngineConfig
from nanospec.errors import ConfigError, NanospecError
from nanospec.llm import LLM, output_of
from nanospec.text import Message
from nanospec.types import Request, SamplingParams, Stats


@dataclass(slots=True)
class Conversation:
    """One row of a prompts file: a raw prompt, or user turns that are answered one by one."""

    index: int  # row in the file, from 0
    source: Any  # the prompt as the row gives it
    turns: list[str | list[int]]
    messages: list[Message] = field(default_factory=list)
    replies: list[Request] = field(default_factory=list)
    error: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = _parser().parse_args(argv)
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
    except BrokenPipeError:  # whoever read stdout is gone; keep Python from flushing into the void
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
    add("--seed", type=int, default=0, help="of the random numbers; row i of a file uses seed + i")
    add("--stop", action="append", default=[], metavar="TEXT", help="text that ends the output")
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def _add_engine_options(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--model", required=True, help="folder or Hugging Face id")
    add("--draft", help="drafter: folder or Hugging Face id")
    add("--speculator", default="auto", choices=choices.SPECULATORS, help="what drafts")
    add("--dtype", default="auto", choices=choices.DTYPES, help="auto: the checkpoint's")
    add("--device", default="auto", choices=choices.DEVICES, help="auto: cuda where there is one")
    add("--load-format", default="auto", choices=choices.LOAD_FORMATS, help="dummy: random weights")
    add("--attention", default="auto", choices=choices.ATTENTION_BACKENDS, help="backend")
    add("--page-size", type=int, default=16, help="tokens per KV page")
    add("--max-model-len", type=int, help="tokens of prompt and output (default: the model's)")
    add("--max-num-seqs", type=int, default=256, help="requests that may run at once")
    add("--max-num-batched-tokens", type=int, default=2048, help="rows of one forward")
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
        raise ConfigError("pass either a prompt or --prompts FILE")
    if args.resume and args.output is None:
        raise ConfigError("--resume needs --output FILE")
    if args.output is not None and args.prompts is None:
        raise ConfigError("--output needs --prompts FILE")
    params = _sampling_params(args)
    engine_options = {
        each.name: getattr(args, each.name)
        for each in fields(EngineConfig)
        if each.name != "seed"  # here it is the requests' own, not that of the engine
    }
    EngineConfig.from_options(engine_options)  # options are wrong sooner than a model is loaded
    if args.prompts is None:
        if not args.prompt.strip():
            raise ConfigError("the prompt is empty")
        return _answer(args, LLM(**engine_options), params)
    conversations = read_prompts(args.prompts)
    finished = _finished_rows(args, conversations)
    todo = [each for each in conversations if each.index not in finished]
    return _answer_file(args, LLM(**engine_options), params, todo)


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    options = {name: getattr(args, name) for name in (*names, "stop", "ignore_eos")}
    return SamplingParams(**options)


def _answer(args: argparse.Namespace, llm: LLM, params: SamplingParams) -> int:
    """Answer the one prompt of the command line, streaming unless JSON is wanted."""
    conversation = Conversation(index=0, source=args.prompt, turns=[args.prompt])
    request = llm.engine.add(_next_prompt(args, llm, conversation), params)
    while not request.is_finished:
        llm.engine.step()
        if not args.json:
            sys.stdout.write(request.text.take())
            sys.stdout.flush()
    if args.json:
        print(json.dumps(_as_row(args.prompt, request), ensure_ascii=False))
        return 0
    print(flush=True)
    print(_summary(request.stats), file=sys.stderr)
    return 0


def _answer_file(
    args: argparse.Namespace, llm: LLM, params: SamplingParams, todo: list[Conversation]
) -> int:
    """Answer the rows of a file; each is written as soon as its last turn is answered."""
    prompts = [_next_prompt(args, llm, each) for each in todo]
    own = [_with_seed(params, each.index) for each in todo]
    for conversation, prompt, each in zip(todo, prompts, own, strict=True):
        try:
            llm.engine.check(prompt, each)
        except NanospecError as error:
            raise ConfigError(f"{args.prompts}, row {conversation.index + 1}: {error}") from error
    running = {llm.engine.add(p, o): c for c, p, o in zip(todo, prompts, own, strict=True)}
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    with tqdm(total=len(todo), unit="row", file=sys.stderr) as progress:
        for row in _rows(args, llm, running):
            rows.append(row)
            progress.update()
            _write_row(args, row)
    total = _total([row["stats"] for row in rows], time.perf_counter() - started)
    if args.json:
        document = {"stats": total.as_dict(), "outputs": sorted(rows, key=lambda r: r["index"])}
        print(json.dumps(document, ensure_ascii=False))
    print(_summary(total), file=sys.stderr)
    failed = sum("error" in row for row in rows)
    if failed:
        print(f"nanospec: {failed} rows ended early, see their field error", file=sys.stderr)
    return 1 if failed else 0


def _rows(
    args: argparse.Namespace, llm: LLM, running: dict[Request, Conversation]
) -> Iterator[dict[str, Any]]:
    """Advance all conversations and yield the output row of each that ends."""
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
            yield _conversation_row(conversation)


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


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    return SamplingParams(**(values | {"seed": (params.seed or 0) + index}))


def read_prompts(path: Path) -> list[Conversation]:
    """Read a file of JSON lines, each with a field `prompt`, `question` or `turns`.

    Raises:
        ConfigError: the file or one of its lines cannot be used; the line is named.
    """
    try:
        lines = _lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} holds no prompts")
    return [
        _read_prompt(f"{path}, line {number}", index, line)
        for index, (number, line) in enumerate(numbered)
    ]


def _read_prompt(where: str, index: int, line: str) -> Conversation:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    known = ("prompt", "question", "turns")
    names = [name for name in known if name in row] if isinstance(row, dict) else []
    if len(names) != 1:
        raise ConfigError(f"{where} needs one of the fields prompt, question and turns")
    source = row[names[0]]
    turns = source if names[0] == "turns" else [source]
    if not isinstance(turns, list) or not turns or not all(_is_turn(turn) for turn in turns):
        raise ConfigError(f"{where}: {names[0]} is empty or is not text")
    return Conversation(index=index, source=source, turns=turns)


def _lines(text: str) -> list[str]:
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028, unescaped.
    return text.removesuffix("\n").split("\n")


def _is_turn(turn: Any) -> bool:
    if isinstance(turn, str):
        return bool(turn.strip())
    return isinstance(turn, list) and bool(turn) and all(isinstance(t, int) for t in turn)


def _finished_rows(args: argparse.Namespace, conversations: list[Conversation]) -> set[int]:
    """Return the rows that the output file holds, and cut off a line left incomplete there."""
    path: Path | None = args.output
    if path is None:
        return set()
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no folder; --output {path} cannot be written")
    if not path.exists() or path.stat().st_size == 0:
        return set()
    if not args.resume:
        raise ConfigError(f"{path} exists; pass --resume to go on with it, or another --output")
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    finished = set()
    for number, line in enumerate(_lines(complete.decode()), start=1):
        try:
            row = json.loads(line)
            index, source = row["index"], row["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ConfigError(f"{path}, line {number} is no row that --output wrote") from None
        if index >= len(conversations) or conversations[index].source != source:
            raise ConfigError(f"{path}, line {number} belongs to other prompts than {args.prompts}")
        finished.add(index)
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    return finished


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
        stats = [reply.stats.as_dict() for reply in replies]
        row["stats"] = _total(stats, sum(reply.stats.seconds for reply in replies)).as_dict()
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


def _total(stats: Sequence[dict[str, float]], seconds: float) -> Stats:
    names = [each.name for each in fields(Stats) if each.name != "seconds"]
    sums = {name: int(sum(each[name] for each in stats)) for name in names}
    return Stats(**sums, seconds=seconds)


def _summary(stats: Stats) -> str:
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} tokens/s), "
        f"{stats.rounds} rounds, acceptance length {stats.acceptance_length:.2f}, "
        f"{stats.drafted} drafted / {stats.verified} verified / {stats.accepted} accepted"
    )


if __name__ == "__main__":
    sys.exit(main())
