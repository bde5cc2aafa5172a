#!/usr/bin/env python3
"""One engine's part of a comparison, in a process of its own: runs a job, writes what came when.

`ab_vllm.py` starts it; what follows from its output `ab_report.py` says.

Example:
    python scripts/ab_engines.py --job job.json --out out.json
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ab_job import AbEngine, Job, Update, drive
from ab_server import UrlEngine

WARM_UP_TOKENS = 16  # of each request that is not counted
_GRAPH_ROWS = 512  # the most that vLLM captures unless told otherwise (0.33, config/vllm.py)
_FORKS = 16  # of which gaps are measured at once
_GRAPH_STEP = 32  # rows between the sizes beyond


class NanospecEngine:
    """This project's engine."""

    def __init__(self, engine: Any, params: Callable[[int], Any]):
        self._engine = engine
        self._params = params
        self._running: dict[int, tuple[int, int]] = {}  # by id: prompt, and tokens seen

    def start(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See `AbEngine.start`."""
        request = self._engine.add(prompt, self._params(max_tokens))
        self._running[request.request_id] = (index, len(prompt))

    def step(self) -> list[Update]:
        """See `AbEngine.step`. Where rounds run ahead a step may bring nothing."""
        updates = []
        for request in self._engine.step():
            index, seen = self._running[request.request_id]
            self._running[request.request_id] = (index, len(request.tokens))
            text = request.text.take()  # made here, as for who streams; vLLM's answers have it too
            updates.append(Update(index, request.tokens[seen:], text, request.finish_reason))
        return updates

    def drain(self) -> None:
        """See `AbEngine.drain`."""
        self._engine.settle()


def create_nanospec(job: Job) -> NanospecEngine:
    """Load nanospec."""
    from nanospec import LLM, SamplingParams
    from nanospec.spec.registry import SPECULATORS

    speculator = "none" if job.mode == "none" else "dspark"
    if job.synthetic_acceptance is not None and speculator == "dspark":
        from synthetic import SyntheticDSpark

        own = {"mean": job.synthetic_acceptance, "concentration": None}
        # Its name is that of the drafter whose costs it has: cost tables are made without coins.
        SPECULATORS["synthetic"] = type("DSparkSpeculator", (SyntheticDSpark,), own)
        speculator = "synthetic"
    is_adaptive = job.mode == "adaptive"
    options: dict[str, Any] = {
        "draft": job.draft,
        "speculator": speculator,
        "max_draft_len": job.num_draft if job.draft else None,
        "adaptive": "auto" if is_adaptive else "off",
        "cost_table": job.cost_table if is_adaptive else None,
        "dtype": job.dtype,
        "load_format": job.load_format,
        "max_model_len": job.max_model_len,
        "max_num_seqs": job.max_num_seqs,
        "prefix_caching": False,
        "seed": job.seed,
    }

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=job.temperature,
            max_tokens=max_tokens,
            stop_token_ids=job.stop_ids,
            ignore_eos=True,  # the stop ids name it
        )

    llm = LLM(job.model, **(options | job.options))
    return NanospecEngine(llm.engine, params)


class VllmEngine:
    """vLLM in the calling process, its core in another, as `vllm.LLM` starts it."""

    def __init__(self, engine: Any, params: Callable[[int], Any]):
        self._engine = engine
        self._params = params

    def start(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        """See `AbEngine.start`."""
        own = {"prompt_token_ids": list(prompt)}
        self._engine.add_request(str(index), own, self._params(max_tokens))

    def step(self) -> list[Update]:
        """See `AbEngine.step`. The core answers step by step, so each answer is a round."""
        updates = []
        for output in self._engine.step():
            (own,) = output.outputs
            updates.append(
                Update(int(output.request_id), list(own.token_ids), "", own.finish_reason)
            )
        return updates

    def drain(self) -> None:
        """See `AbEngine.drain`."""


def create_vllm(job: Job) -> VllmEngine:
    """Load vLLM with its defaults, but without prefix cache and with graphs of all its rows.

    Attention is FlashAttention by name, as another choice of its own may need what is not
    installed; `--vllm-options` may name another.
    """
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    fixes_confidence = job.mode == "adaptive" and job.synthetic_acceptance is not None
    if fixes_confidence:  # a function is sent to the worker, this script's own
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        sys.exit(f"vLLM cannot be imported ({error}); pip install vllm, or pass --engines nanospec")

    def params(max_tokens: int) -> Any:
        return SamplingParams(
            temperature=job.temperature,
            max_tokens=max_tokens,
            stop_token_ids=job.stop_ids,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )

    engine = LLM(**(vllm_options(job) | job.options)).llm_engine
    if fixes_confidence:
        assert job.synthetic_acceptance is not None
        engine.collective_rpc(_fix_confidence, args=(job.synthetic_acceptance,))
    return VllmEngine(engine, params)


def vllm_options(job: Job) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    Its synthetic rates are those of the first 1, 2, .. drafts being accepted together, so of
    slots with probability p each it is p, p^2, ..
    """
    options: dict[str, Any] = {
        "model": job.model,
        "dtype": job.dtype,
        "load_format": job.load_format,
        "max_model_len": job.max_model_len,
        "max_num_seqs": job.max_num_seqs,
        "enable_prefix_caching": False,
        "attention_backend": "FLASH_ATTN",
        "skip_tokenizer_init": not job.has_tokenizer,
        "seed": job.seed,
    }
    if job.draft is not None:
        speculative = {
            "method": "dspark",
            "model": job.draft,
            "num_speculative_tokens": job.num_draft,
            "enable_adaptive_verification": job.mode == "adaptive",
        }
        if job.synthetic_acceptance is not None:
            rates = [job.synthetic_acceptance**depth for depth in range(1, job.num_draft + 1)]
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_rates"] = rates
        options["speculative_config"] = speculative
    if job.most_rows > _GRAPH_ROWS:
        sizes = graph_sizes(job.most_rows, job.most_rows // job.max_num_seqs)
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    return options


def graph_sizes(most: int, per_request: int) -> list[int]:
    """Return rows to capture graphs of: vLLM's own sizes, then steps of whole requests to `most`.

    Example:
        >>> graph_sizes(576, 8)[-4:]
        [512, 544, 576]
    """
    own = [1, 2, 4, *range(8, 256, 8), *range(256, _GRAPH_ROWS + 1, 16)]
    step = per_request * max(_GRAPH_STEP // per_request, 1)
    first = -(-(_GRAPH_ROWS + 1) // step) * step
    return [*own, *range(first, most, step), most]


def _fix_confidence(worker: Any, probability: float) -> None:
    """Let the drafter's confidence head say one probability, as the coins do. Runs in a worker."""
    head = worker.model_runner.speculator.model.model.confidence_head.proj
    head.weight.data.zero_()
    head.bias.data.fill_(math.log(probability / (1 - probability)))


def measure_gaps(job: Job) -> list[dict[str, float]]:
    """Say how near to a tie the target was where two outputs of the same prompt part.

    The target runs by nanospec, many forks at once, in ways that are equal but for rounding: all
    rows at once, and the last one or eight after the others, as decoding and verifying would; and
    in float32. The first three share how they round the keys and values of what is before, so they
    may agree where two engines do not: how far rounding goes shows only beside the last.

    Returns:
        For each fork (prompt and common tokens, one output's next token, the other's): `gap` of the
        two largest logits; `behind`, how far the lower of the two tokens is below the largest;
        `between`, the difference of these two tokens; `noise`, the largest difference of one of
        these two between two of the ways; `step`, from the largest logit to the next number that
        the logits' own dtype has: in bfloat16 it may exceed the noise, and a tie may be exact.
    """
    ways, dtype = _ways(job, {}, (0, 1, 8))
    if dtype != torch.float32:
        # Not all attention has float32.
        exact, _ = _ways(job, {"dtype": "float32", "attention": "auto"}, (0,))
        ways = torch.cat((ways, exact))
    return [_gap(own, torch.finfo(dtype).eps) for own in ways.transpose(0, 1)]


def _ways(
    job: Job, own_options: dict[str, Any], aparts: Sequence[int]
) -> tuple[Tensor, torch.dtype]:
    """Return [ways, forks, 4] fp64: the two largest logits, and those of a fork's tokens.

    Args:
        job: its `forks`, and how its engine runs.
        own_options: what the engine is told in place of that.
        aparts: of each way, see `_last_logits`.

    Returns:
        Beside them the dtype of the logits.
    """
    from nanospec import LLM

    longest = max(len(prefix) for prefix, *_ in job.forks)
    options: dict[str, Any] = {
        "speculator": "none",
        "dtype": job.dtype,
        "max_model_len": job.max_model_len,
        "max_num_seqs": _FORKS,
        "max_num_batched_tokens": _FORKS * longest,
        "max_graph_rows": 0,
    }
    engine = LLM(job.model, **(options | job.options | own_options)).engine
    size = min(_FORKS, engine.pages.num_pages // engine.pages.pages_for(longest))
    found = []
    for start in range(0, len(job.forks), size):
        forks = job.forks[start : start + size]
        tokens = torch.tensor([own for _, *own in forks])
        for apart in aparts:
            logits = _last_logits(engine, [prefix for prefix, *_ in forks], apart)
            seen = torch.cat((logits.topk(2).values, logits.gather(1, tokens)), dim=1)
            found.append(seen.double())
    del engine  # the next one takes what memory there is
    gc.collect()
    torch.cuda.empty_cache()
    by_way = [torch.cat(found[way :: len(aparts)]) for way in range(len(aparts))]
    return torch.stack(by_way), logits.dtype


def _last_logits(engine: Any, prefixes: Sequence[Sequence[int]], apart: int) -> Tensor:
    """Return the logits after each prefix, [N, V], its last `apart` rows in a forward of theirs.

    Fewer, where a prefix is shorter: all have rows in both forwards.
    """
    from nanospec.attention.batch import batch_of_spans

    runner, cache = engine._ctx.runner, engine._ctx.caches[0]
    width = -(-max(map(len, prefixes)) // cache.page_size)
    tables = [list(range(at * width, (at + 1) * width)) for at in range(len(prefixes))]
    apart = min(apart, min(map(len, prefixes)) - 1)
    cuts = [len(prefix) - apart for prefix in prefixes]
    spans = [[range(cut) for cut in cuts]]
    if apart > 0:
        spans.append([range(cut, len(own)) for cut, own in zip(cuts, prefixes, strict=True)])
    with torch.inference_mode():
        for own in spans:
            rows = [prefix[at] for prefix, span in zip(prefixes, own, strict=True) for at in span]
            token_ids = torch.tensor(rows, device=engine.device)
            batch = batch_of_spans(own, tables, token_ids, page_size=cache.page_size)
            ends = batch.qo_indptr[1:].long() - 1
            logits = runner.run(replace(batch, logit_rows=ends)).logits
        found: Tensor = logits.cpu()
        return found


def _gap(ways: Tensor, eps: float) -> dict[str, float]:
    """Return a fork's numbers, see `measure_gaps`, from [ways, 4] of `_ways`."""
    best, second, *chosen = ways[0].tolist()
    return {
        "gap": best - second,
        "behind": best - min(chosen),
        "between": abs(chosen[0] - chosen[1]),
        "noise": float((ways.amax(dim=0) - ways.amin(dim=0))[2:].max()),
        "step": math.ldexp(eps, math.frexp(best)[1] - 1),
    }


ENGINES: dict[str, Callable[[Job], AbEngine]] = {
    "nanospec": create_nanospec,
    "vllm": create_vllm,
    "url": UrlEngine,
}


def run(job: Job) -> dict[str, Any]:
    """Do a job; return what is written."""
    if job.engine == "gaps":
        return {"gaps": measure_gaps(job)}
    started = time.perf_counter()
    engine = ENGINES[job.engine](job)
    load_seconds = time.perf_counter() - started
    runs = []
    for load, count in job.loads:
        warm_up = job.prompts[:load]
        drive(engine, warm_up, min(WARM_UP_TOKENS, job.max_tokens), load)
        records = drive(engine, job.prompts[:count], job.max_tokens, load)
        runs.append({"concurrency": load, "records": records})
    return {
        "engine": job.engine,
        "mode": job.mode,
        "version": getattr(sys.modules.get(job.engine), "__version__", None),
        "load_seconds": load_seconds,
        "runs": runs,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Read a job, do it, write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, required=True, help="JSON, the fields of `Job`")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    args = parser.parse_args(argv)
    found = run(Job(**json.loads(args.job.read_text())))
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
