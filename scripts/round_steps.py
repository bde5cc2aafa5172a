"""The time of each of a round's steps, on the device and on the host, and what a forward could do.

Steps are timed where `engine.round` calls them; nothing in the engine knows of it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nanospec.engine import engine as engine_module
from nanospec.engine import round as round_module
from nanospec.engine.answer import Answer
from nanospec.engine.engine import Engine
from nanospec.models.decoder import Decoder

STEPS = ("plan", "pack", "forward", "accept", "commit", "observe", "propose")
WAIT = "wait"  # of `commit`, for the answer; no work of the host's

Span = tuple[str, float, tuple[torch.cuda.Event, torch.cuda.Event] | None]


@contextmanager
def timed_steps(engine: Engine) -> Iterator[list[Span]]:
    """Collect the calls of each step while inside: its name, host seconds, and events around it."""
    spans: list[Span] = []
    on_gpu = engine.device.type == "cuda"

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            events = None
            if on_gpu:
                events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                events[0].record()
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - started
                if events is not None:
                    events[1].record()
                spans.append((name, seconds, events))

        return run

    ctx = engine._ctx
    places = [
        ("plan", ctx.speculator, "admit"),
        ("plan", ctx.speculator, "plan"),
        ("pack", round_module, "pack"),
        ("forward", ctx.runner, "run"),
        ("accept", ctx.speculator, "accept"),
        ("accept", round_module, "accept"),
        ("commit", round_module, "sum_up"),
        ("commit", round_module, "move_accepted"),
        ("commit", round_module, "_commit"),
        (WAIT, Answer, "read"),
        ("observe", ctx.speculator, "observe_step"),
        ("propose", engine_module if ctx.runs_ahead else round_module, "propose"),
    ]
    with ExitStack() as stack:
        for name, owner, attribute in places:
            call = timed(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, call))
        yield spans


def step_times(spans: Sequence[Span], rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of each step per round: on the device, where there is one, and the host.

    What `commit` waits for is not counted as work of the host, but given as `wait`.
    """
    device, host = dict.fromkeys(STEPS, 0.0), dict.fromkeys((*STEPS, WAIT), 0.0)
    for name, seconds, events in spans:
        host[name] += 1e3 * seconds / rounds
        if events is not None and name != WAIT:
            events[1].synchronize()
            device[name] += events[0].elapsed_time(events[1]) / rounds
    host["commit"] -= host[WAIT]
    return {"device_ms": device, "host_ms": host}


def copy_bandwidth(device: torch.device, num_bytes: int = 2 << 30) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source))


def products_ms(decoder: Decoder, num_rows: int, num_logits: int) -> float:
    """Return the milliseconds of a forward's products alone, by the library, in a CUDA graph.

    Args:
        decoder: its weights are multiplied.
        num_rows: T.
        num_logits: N, rows whose logits are wanted.
    """
    layers = [
        linear.weight
        for layer in decoder.layers
        for linear in (
            *(layer.self_attn.qkv_proj, layer.self_attn.o_proj),
            *(layer.mlp.gate_up_proj, layer.mlp.down_proj),
        )
    ]
    head = decoder.lm_head.weight

    # Random numbers: of zeros a GPU needs less power, and keeps a clock that no forward has.
    def random(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, dtype=head.dtype, device=head.device)

    inputs = {width: random(num_rows, width) for width in {each.shape[1] for each in layers}}
    outputs = {width: random(num_rows, width) for width in {len(each) for each in layers}}
    wanted, logits = random(num_logits, head.shape[1]), random(num_logits, len(head))

    def run() -> None:
        for weight in layers:
            torch.mm(inputs[weight.shape[1]], weight.T, out=outputs[len(weight)])
        torch.mm(wanted, head.T, out=logits)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return 1e3 * _seconds(graph.replay)


def work_of_forward(
    decoder: Decoder, num_rows: float, num_logits: float, num_keys: float
) -> tuple[float, float]:
    """Return the bytes a forward reads at least, and its floating-point operations.

    Weights, keys and values count once; operations are those of the products, two for each weight
    and row.

    Args:
        decoder: the target.
        num_rows: T.
        num_logits: N.
        num_keys: tokens in the cache, of all requests.
    """
    config, size = decoder.config, decoder.dtype.itemsize
    in_layers = sum(p.numel() for layer in decoder.layers for p in layer.parameters())
    head = decoder.lm_head.weight.numel()
    in_cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * num_keys
    return size * (in_layers + head + in_cache), 2 * (in_layers * num_rows + head * num_logits)


def _seconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Return the median seconds of a run on the device."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(repeats + 1):
        first.record()
        run()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3)
    return statistics.median(found[1:])
