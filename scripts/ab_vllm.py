#!/usr/bin/env python3
"""Compare nanospec with vLLM, or with any server: same weights, prompts, sampling and GPU.

Each engine runs in a process of its own, loaded once for all concurrencies of a mode, one after the
other; with --repeats they take turns. Both get the same token ids, made once. Tokens per second
count over wall time, from the first admission to the last token, so the last requests, which run
beside fewer and fewer, count too; give --prompts-per-slot 4 or more where that matters. vLLM gets
graphs of all its rows.

Example:
    python scripts/ab_vllm.py --engines nanospec --modes none,spec --concurrency 1,4 --limit 8
    python scripts/ab_vllm.py --model Qwen/Qwen3-8B --draft deepseek-ai/dspark_qwen3_8b_block7 \\
        --data gsm8k_test.jsonl --limit 256 --modes none,spec --out docs/results/ab_qwen3_8b
    python scripts/ab_vllm.py --shapes qwen3-8b --synthetic-acceptance 0.85 --max-tokens 256
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanospec.errors import NanospecError

sys.path.insert(0, str(Path(__file__).resolve().parent))
import ab_report
from ab_job import Job
from ab_task import Task, prepare
from provenance import provenance
from shapes import SHAPES

SCRIPT = Path(__file__).resolve().with_name("ab_engines.py")
MODES = ("none", "spec", "adaptive")
ENGINES = ("nanospec", "vllm", "url")
_LAST_LINES = 15  # of a failed job's messages, that are shown


def main(argv: Sequence[str] | None = None) -> None:
    """Run all jobs; print tables, then one JSON line. Exits with 1 if any job failed."""
    args = parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            task = prepare(args, folder)
        except NanospecError as error:
            print(f"ab_vllm.py: {error}", file=sys.stderr)
            sys.exit(2)
        results, failed = run_all(list(jobs(args, task.base)), folder)
        cells = collect(results, task)
        rows = [ab_report.summarise(*key, repeats, task.is_right) for key, repeats in cells.items()]
        pairs = compare(args, task, cells, rows, folder, failed)
    versions = {each["engine"]: each["version"] for each in results if each["version"]}
    origin = provenance()
    origin["versions"] |= versions
    document = origin | {
        "arguments": {name: _plain(value) for name, value in vars(args).items()},
        "load_seconds": [[e["engine"], e["mode"], e["load_seconds"]] for e in results],
        "failed": failed,
        "rows": rows,
        "pairs": pairs,
    }
    if rows:
        print(ab_report.as_text(ab_report.rows_as_cells(rows)))
    if pairs:
        print("\n" + ab_report.as_text(ab_report.pairs_as_cells(pairs)))
    if rows and args.out is not None:
        write_report(args.out, document)
    print(json.dumps(document))
    if failed:
        sys.exit(1)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; exits with 2 where they cannot work together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hugging Face id (default: the embedded pair)")
    parser.add_argument("--draft", help="DSpark drafter: folder or Hugging Face id")
    parser.add_argument("--shapes", choices=tuple(SHAPES), help="random weights of this shape")
    parser.add_argument("--task", choices=("gsm8k",), default="gsm8k")
    parser.add_argument(
        "--data",
        type=Path,
        help="JSON lines of question and answer (default: the embedded pair's held-out problems, "
        "or 20 of GSM8K)",
    )
    parser.add_argument("--limit", type=int, default=256, help="prompts at most (256)")
    parser.add_argument("--concurrency", type=_counts, default=[1, 8, 32, 128], help="1,8,32,128")
    parser.add_argument(
        "--prompts-per-slot",
        type=int,
        default=0,
        metavar="M",
        help="at concurrency c run the first c * M prompts only; 0: all (0)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an output (512)")
    parser.add_argument("--modes", default="none,spec", help=f"of {','.join(MODES)}")
    parser.add_argument("--engines", help="nanospec,vllm (or url in place of vllm)")
    parser.add_argument("--engine-url", metavar="URL", help="OpenAI-compatible server: engine url")
    parser.add_argument("--num-draft", type=int, help="K (default: the drafter's block)")
    parser.add_argument("--dtype", default="auto", help="bfloat16, float16, float32 or auto (auto)")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument(
        "--synthetic-acceptance",
        type=float,
        metavar="P",
        help="accept each draft with this probability, given those before; output is void",
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="random ones of --shapes")
    parser.add_argument("--cost-table", help="of nanospec, for mode adaptive: JSON")
    parser.add_argument("--repeats", type=int, default=1, help="of every job (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nanospec-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--vllm-options", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--out", type=Path, help="report: this name with .md, .json and .png")
    parser.add_argument("--keep", type=Path, help="folder for what every job wrote")
    args = parser.parse_args(argv)
    other = "vllm" if args.engine_url is None else "url"
    args.engines = (args.engines or f"nanospec,{other}").split(",")
    args.modes = args.modes.split(",")
    problem = _problem(args)
    if problem:
        parser.error(problem)
    return args


def _counts(text: str) -> list[int]:
    counts = [int(each) for each in text.split(",")]
    if min(counts) < 1:
        raise ValueError("below 1")
    return counts


def _problem(args: argparse.Namespace) -> str | None:
    """Say what is wrong with the arguments."""
    unknown = [*({*args.engines} - {*ENGINES}), *({*args.modes} - {*MODES})]
    speculates = {*args.modes} != {"none"}
    if unknown:
        return f"{unknown[0]!r} is unknown; engines are {ENGINES}, modes {MODES}"
    if "url" in args.engines and args.engine_url is None:
        return "engine url needs --engine-url"
    if "vllm" in args.engines and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed; pip install vllm, or pass --engines nanospec"
    if speculates and args.model is not None and args.draft is None:
        return "modes spec and adaptive need --draft; without one pass --modes none"
    if args.draft is not None and args.model is None:
        return "--draft needs the --model that it drafts for"
    if args.model is not None and args.shapes is not None:
        return "--shapes brings a model of its own; leave out --model"
    if "adaptive" in args.modes and "nanospec" in args.engines and args.cost_table is None:
        return "mode adaptive needs --cost-table, made by scripts/profile_costs.py"
    if args.synthetic_acceptance is not None and not 0 < args.synthetic_acceptance < 1:
        return "--synthetic-acceptance is out of range; pass more than 0 and less than 1"
    if min(args.limit, args.repeats, args.max_tokens) < 1:
        return "--limit, --repeats and --max-tokens are 1 or more"
    return None


def jobs(args: argparse.Namespace, base: Job) -> Iterator[Job]:
    """Yield every job, engines taking turns."""
    options = {"nanospec": args.nanospec_options, "vllm": args.vllm_options}
    for repeat in range(args.repeats):
        for mode in args.modes:
            for engine in args.engines:
                own = "server" if engine == "url" else mode
                if engine == "url" and mode != args.modes[0]:
                    continue  # it does what it was started to do
                yield replace(
                    base,
                    engine=engine,
                    mode=own,
                    draft=None if own in ("none", "server") else base.draft,
                    options=options.get(engine, {}),
                    seed=args.seed + repeat,
                )


def run_all(todo: Sequence[Job], folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Run jobs one after the other; return what they wrote, and which of them failed."""
    results, failed = [], []
    for number, job in enumerate(todo):
        name = f"{number:02}-{job.engine}-{job.mode}"
        title = f"[{number + 1}/{len(todo)}] {job.engine} {job.mode}"
        print(title, end=" ", file=sys.stderr, flush=True)
        started = time.perf_counter()
        found = run_apart(job, folder / name)
        print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
        if found is None:
            failed.append(f"{job.engine} {job.mode}, seed {job.seed}")
        else:
            results.append(found)
    return results, failed


def run_apart(job: Job, path: Path) -> dict[str, Any] | None:
    """Run a job in a process of its own, its files beginning with `path`; None if it failed."""
    given, out, log = (path.with_name(path.name + end) for end in (".job.json", ".json", ".log"))
    given.write_text(json.dumps(asdict(job)))
    command = [sys.executable, str(SCRIPT), "--job", str(given), "--out", str(out)]
    with log.open("wb") as messages:
        env = os.environ | {"PYTHONPATH": _python_path()}
        done = subprocess.run(command, stdout=messages, stderr=messages, env=env, check=False)
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(out.read_text())
        return found
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    print(f"failed with {done.returncode}:", *lines, sep="\n    ", file=sys.stderr)
    return None


def _python_path() -> str:
    """Return the path on which this checkout's nanospec comes first."""
    own = str(SCRIPT.parents[1])
    return os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))


Cells = dict[tuple[str, str, int], list[list[dict[str, Any]]]]


def collect(results: Sequence[dict[str, Any]], task: Task) -> Cells:
    """Return the records of every engine, mode and concurrency, a list per repeat, with text."""
    cells: Cells = {}
    for result in results:
        for run in result["runs"]:
            key = (result["engine"], result["mode"], run["concurrency"])
            cells.setdefault(key, []).append(run["records"])
            for record in run["records"]:
                if record["token_ids"] is not None and task.tokenizer is not None:
                    record["text"] = task.tokenizer.decode(record["token_ids"])
    return cells


def compare(
    args: argparse.Namespace,
    task: Task,
    cells: Cells,
    rows: Sequence[dict[str, Any]],
    folder: Path,
    failed: list[str],
) -> list[dict[str, Any]]:
    """Return the pairs: the first engine's with the others', and each engine's with its none."""
    by_key = {(row["engine"], row["mode"], row["concurrency"]): row for row in rows}
    couples = [
        (one, other)
        for one in by_key
        for other in by_key
        if one[2] == other[2] and _are_compared(args.engines[0], one, other)
    ]
    couples.sort(key=lambda couple: (couple[0][2], couple[0][0] == couple[1][0]))
    # With coins, drawn tokens, or weights that each engine draws itself, outputs differ anyway.
    is_void = args.synthetic_acceptance is not None or task.base.load_format == "dummy"
    is_same = args.temperature == 0 and not is_void
    parted = {
        couple: ab_report.forks(cells[couple[0]][0], cells[couple[1]][0])
        for couple in couples
        if is_same
    }
    measure(args, task, [fork for found in parted.values() for fork in found], folder, failed)
    return [ab_report.pair(by_key[a], by_key[b], parted.get((a, b))) for a, b in couples]


def _are_compared(first: str, one: tuple[str, str, int], other: tuple[str, str, int]) -> bool:
    if one[0] == other[0]:
        return one[1] != other[1] == "none"
    return one[0] == first and (one[1] == other[1] or other[1] == "server")


def measure(
    args: argparse.Namespace,
    task: Task,
    forks: Sequence[dict[str, Any]],
    folder: Path,
    failed: list[str],
) -> None:
    """Give forks between token ids their `gap`, measured in one more process."""
    known: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for fork in forks:
        if fork["tokens"] is not None:
            known.setdefault((fork["prompt"], *fork["common"], *fork["tokens"]), []).append(fork)
    if not known:
        return
    job = replace(
        task.base,
        engine="gaps",
        draft=None,
        options=args.nanospec_options,
        prompts=[],
        loads=[],
        forks=[
            (task.prompts[own["prompt"]] + own["common"], *own["tokens"])
            for own, *_ in known.values()
        ],
    )
    results, lost = run_all([job], folder)
    failed += lost
    for result in results:
        for same, gap in zip(known.values(), result["gaps"], strict=True):
            for fork in same:
                fork["gap"] = gap


def write_report(out: Path, document: dict[str, Any]) -> None:
    """Write the document, and as Markdown what people want of it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    name: str | None = out.name + ".png"
    try:
        ab_report.plot(out.with_name(out.name + ".png"), document["rows"])
    except ImportError:
        print("no plot, as matplotlib is not installed: pip install matplotlib", file=sys.stderr)
        name = None
    out.with_name(out.name + ".md").write_text(ab_report.markdown(document, name))
    out.with_name(out.name + ".json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
