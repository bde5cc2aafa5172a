"""What follows from the records of a comparison: figures, agreement, tables, a plot.

Functions of data alone: `ab_job.drive` says what a record is, and nothing here runs an engine.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
IsRight = Callable[[int, str], bool]  # (prompt, text) -> whether it ends in the right number

NEAR_TIE = 4.0  # times the noise: logits nearer than this may change places by rounding
ENOUGH_IDENTICAL = 0.95  # of the outputs
SAME_LENGTH = 0.03  # relative difference of acceptance lengths


def acceptance_length(records: Sequence[Record]) -> float | None:
    """Return tokens emitted per round, as seen from outside; None where no round counts.

    A request's first emission ends its prompt, and its last round may be cut by a stop or by the
    length: neither counts. Nor does anything of a request whose emissions do not say their tokens.
    """
    rounds = [
        tokens
        for record in records
        if record["token_ids"] is not None
        for _, tokens in record["emissions"][1:-1]
    ]
    return statistics.fmean(rounds) if rounds else None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def time_to_first(record: Record) -> float:
    """Return seconds from admission to the first token."""
    return float(record["emissions"][0][0] - record["admitted"])


def time_per_token(record: Record) -> float | None:
    """Return seconds per token after the first emission; None where none followed."""
    (first, tokens), last = record["emissions"][0], record["emissions"][-1][0]
    later = record["num_tokens"] - (tokens or 1)
    return (last - first) / later if later > 0 else None


def summarise(
    engine: str,
    mode: str,
    concurrency: int,
    repeats: Sequence[Sequence[Record]],
    is_right: IsRight | None = None,
) -> dict[str, Any]:
    """Return a row of figures.

    Args:
        engine: name.
        mode: of it.
        concurrency: requests at once.
        repeats: records of the same prompts, once or more. Times of all requests count together,
            of rates over wall time the median counts.
        is_right: None where answers mean nothing.
    """
    records = [record for own in repeats for record in own if record["emissions"]]
    rates = [sum(r["num_tokens"] for r in own) / wall_seconds(own) for own in repeats]
    per_request = [
        r["num_tokens"] / (r["emissions"][-1][0] - r["admitted"])
        for r in records
        if r["emissions"][-1][0] > r["admitted"]
    ]
    firsts = [1e3 * time_to_first(record) for record in records]
    others = [1e3 * each for r in records if (each := time_per_token(r)) is not None]
    row: dict[str, Any] = {
        "engine": engine,
        "mode": mode,
        "concurrency": concurrency,
        "prompts": len(repeats[0]),
        "output_tokens": sum(record["num_tokens"] for record in repeats[0]),
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_of_repeats": rates,
        "tokens_per_second_per_request": statistics.median(per_request or [0.0]),
        "ttft_ms": _spread(firsts),
        "tpot_ms": _spread(others),
        "acceptance_length": acceptance_length(records),
        "accuracy": None,
        "accuracy_error": None,
    }
    if is_right is not None:
        right = [is_right(i, str(r["text"])) for own in repeats for i, r in enumerate(own)]
        accuracy = sum(right) / len(right)
        row["accuracy"] = accuracy
        # Repeats ask the same questions again, so they make the error no smaller.
        row["accuracy_error"] = math.sqrt(accuracy * (1 - accuracy) / len(repeats[0]))
    return row


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "p99": percentile(values, 0.99)}


def wall_seconds(records: Sequence[Record]) -> float:
    """Return seconds from the first admission to the last token."""
    start = min(record["admitted"] for record in records)
    end = max((time for record in records for time, _ in record["emissions"]), default=start)
    return max(float(end - start), 1e-9)


def first_difference(one: Record, other: Record) -> int | None:
    """Return where two outputs part, None if nowhere: a token, or a character of their texts."""
    if one["token_ids"] is None or other["token_ids"] is None:
        left, right = one["text"], other["text"]
    else:
        left, right = one["token_ids"], other["token_ids"]
    for index, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def forks(ones: Sequence[Record], others: Sequence[Record]) -> list[dict[str, Any]]:
    """Return where outputs of the same prompts part.

    Returns:
        Of each that does: `prompt`, its number; `position` of the first difference; `common`, the
        output's token ids before it, and `tokens`, the two that follow, both None where ids are
        not known or an output ends there.
    """
    found = []
    for prompt, (one, other) in enumerate(zip(ones, others, strict=True)):
        at = first_difference(one, other)
        if at is None:
            continue
        mine, theirs = one["token_ids"], other["token_ids"]
        is_fork = mine is not None and theirs is not None and at < min(len(mine), len(theirs))
        found.append(
            {
                "prompt": prompt,
                "position": at,
                "common": mine[:at] if is_fork else None,
                "tokens": [mine[at], theirs[at]] if is_fork else None,
            }
        )
    return found


def is_near_tie(gap: Mapping[str, float]) -> bool:
    """Return whether rounding can explain a fork: neither token is far below the largest logit.

    The noise seen in a few ways to compute logits counts, but never as less than their rounding: in
    16 bits each of the two may come out a step higher or lower.
    """
    return gap["behind"] <= max(NEAR_TIE * gap["noise"], 2 * gap["step"])


def pair(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    parted: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Compare two rows of the same concurrency.

    Args:
        one: of `summarise`.
        other: the same; what a ratio is taken to.
        parted: of `forks`, each with its `gap` where one was measured; None: not compared.
    """
    found: dict[str, Any] = {
        "concurrency": one["concurrency"],
        "one": f"{one['engine']} {one['mode']}",
        "other": f"{other['engine']} {other['mode']}",
        "speed_ratio": one["tokens_per_second"] / other["tokens_per_second"],
        "identical": None,
        "forks": None,
    }
    holds = {"faster": found["speed_ratio"] > 1}
    lengths = one["acceptance_length"], other["acceptance_length"]
    if None not in lengths and "none" not in (one["mode"], other["mode"]):
        found["acceptance_ratio"] = lengths[0] / lengths[1]
        if one["mode"] == other["mode"] == "spec":  # else they need not verify as many drafts
            holds["acceptance"] = abs(found["acceptance_ratio"] - 1) <= SAME_LENGTH
    if one["accuracy"] is not None and other["accuracy"] is not None:
        found["accuracy_difference"] = one["accuracy"] - other["accuracy"]
        error = max(one["accuracy_error"], other["accuracy_error"])
        holds["accuracy"] = abs(found["accuracy_difference"]) <= error
    if parted is not None:
        near = sum(each.get("gap") is not None and is_near_tie(each["gap"]) for each in parted)
        found["identical"] = 1 - len(parted) / one["prompts"]
        found["num_forks"], found["num_near_ties"] = len(parted), near
        found["forks"] = [{k: v for k, v in each.items() if k != "common"} for each in parted]
        holds["outputs"] = found["identical"] >= ENOUGH_IDENTICAL or near == len(parted)
    found["holds"] = holds
    return found


_HEADS = (
    "concurrency",
    "mode",
    "engine",
    "tok/s",
    "tok/s/req",
    "TTFT ms",
    "p99",
    "TPOT ms",
    "p99",
    "length",
    "accuracy",
)
_PAIR_HEADS = ("concurrency", "one", "other", "speed", "length", "accuracy", "identical", "near")


def rows_as_cells(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return the table of figures, engines of the same concurrency and mode together."""
    cells: list[Sequence[str]] = [_HEADS]
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        ttft, tpot = row["ttft_ms"] or {}, row["tpot_ms"] or {}
        accuracy = "-"
        if row["accuracy"] is not None:
            accuracy = f"{row['accuracy']:.1%} ± {row['accuracy_error']:.1%}"
        cells.append(
            (
                str(row["concurrency"]),
                row["mode"],
                row["engine"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['tokens_per_second_per_request']:.1f}",
                _number(ttft.get("median"), ".1f"),
                _number(ttft.get("p99"), ".1f"),
                _number(tpot.get("median"), ".3f"),
                _number(tpot.get("p99"), ".3f"),
                _number(row["acceptance_length"], ".3f"),
                accuracy,
            )
        )
    return cells


def pairs_as_cells(pairs: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return the table of comparisons; a star marks what does not hold."""
    cells: list[Sequence[str]] = [_PAIR_HEADS]
    for own in pairs:
        compares_engines = own["one"].split()[0] != own["other"].split()[0]
        stars = {
            name: "" if holds or (name == "faster" and not compares_engines) else "*"
            for name, holds in own["holds"].items()
        }
        near = "-" if own["forks"] is None else f"{own['num_near_ties']} of {own['num_forks']}"
        cells.append(
            (
                str(own["concurrency"]),
                own["one"],
                own["other"],
                f"{own['speed_ratio']:.2f}x" + stars.get("faster", ""),
                _number(own.get("acceptance_ratio"), ".3f") + stars.get("acceptance", ""),
                _number(own.get("accuracy_difference"), "+.1%") + stars.get("accuracy", ""),
                _number(own["identical"], ".1%") + stars.get("outputs", ""),
                near,
            )
        )
    return cells


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def as_text(cells: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal, first row the heads; words left, figures right."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if 0 < column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def as_markdown(cells: Sequence[Sequence[str]]) -> str:
    """Return the same table in Markdown."""
    lines = [" | ".join(row) for row in cells]
    lines.insert(1, " | ".join(["---:", "---", "---", *["---:"] * (len(cells[0]) - 3)]))
    return "\n".join(f"| {line} |" for line in lines)


def markdown(document: Mapping[str, Any], plot_name: str | None) -> str:
    """Return the report of a document: where it comes from, tables, forks that are no near-tie.

    Args:
        document: provenance, `rows`, `pairs` and `failed`.
        plot_name: file beside it; None: no plot.
    """
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = [
        "# " + " against ".join(dict.fromkeys(row["engine"] for row in document["rows"])),
        f"    {' '.join(document['argv'])}",
        f"On {document['hardware']}, at commit {document['commit']}, with {versions}.",
    ]
    parts += [f"Failed: {each}" for each in document["failed"]]
    if plot_name is not None:
        parts.append(f"![tokens per second against concurrency]({plot_name})")
    parts += [
        as_markdown(rows_as_cells(document["rows"])),
        "Times to the first token and per token after it are medians over requests, with the 99th "
        "percentile. The length is the tokens per round, a request's first emission and last "
        "round left out; it is counted from what was emitted, for every engine alike.",
    ]
    if document["pairs"]:
        parts += [
            as_markdown(pairs_as_cells(document["pairs"])),
            f"Speed and length are ratios, accuracy a difference, of the one to the other. Outputs "
            f"that part do so at a near-tie if both tokens' logits are within {NEAR_TIE:.0f} times "
            f"the noise of the largest, which is what equal ways to compute them differ by, or "
            f"within two steps of their dtype; with repeats, outputs of the first are compared. A "
            f"star marks an accuracy further away than its standard error, a length more than "
            f"{SAME_LENGTH:.0%} away, less than "
            f"{ENOUGH_IDENTICAL:.0%} identical outputs and one that parted elsewhere, or an engine "
            f"that is not faster than another.",
        ]
    far = [
        f"- {own['one']} and {own['other']} at {own['concurrency']}: prompt {fork['prompt']} at "
        f"{fork['position']}, {_gap_text(fork.get('gap'))}"
        for own in document["pairs"]
        for fork in own["forks"] or ()
        if fork.get("gap") is None or not is_near_tie(fork["gap"])
    ]
    if far:
        parts += ["Outputs that part elsewhere:", "\n".join(far)]
    return "\n\n".join(parts) + "\n"


def _gap_text(gap: Mapping[str, float] | None) -> str:
    if gap is None:
        return "not measured"
    return ", ".join(f"{name} {gap[name]:.3g}" for name in ("gap", "behind", "noise", "step"))


def plot(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw tokens per second against concurrency: a line per engine and mode.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        point = (row["concurrency"], row["tokens_per_second"])
        lines.setdefault((row["engine"], row["mode"]), []).append(point)
    styles = {"none": "o:", "spec": "o-", "adaptive": "o--", "server": "o-"}
    colours = {engine: f"C{i}" for i, engine in enumerate(dict.fromkeys(e for e, _ in lines))}
    for (engine, mode), points in lines.items():
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, styles[mode], color=colours[engine], label=f"{engine}, {mode}")
    axes.set(xlabel="requests at once", ylabel="output tokens per second", xscale="log")
    axes.set(yscale="log", xticks=sorted({row["concurrency"] for row in rows}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
