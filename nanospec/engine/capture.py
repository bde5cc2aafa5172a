"""Captures what rounds replay, where graphs are wanted and possible."""

import logging
import time
from collections.abc import Sequence

import torch

from nanospec.attention.backend import AttentionBackend
from nanospec.config import EngineConfig
from nanospec.cudagraph.graph_runner import GraphRunner, Graphs
from nanospec.cudagraph.runner import EagerRunner, ModelRunner
from nanospec.engine.sizing import bytes_for_graphs, graph_limits
from nanospec.errors import ConfigError
from nanospec.models.decoder import Decoder
from nanospec.spec.speculator import Speculator
from nanospec.types import Capability

logger = logging.getLogger(__name__)

_GIB = 2**30


def create_runner(
    config: EngineConfig,
    decoder: Decoder,
    speculator: Speculator,
    attention: AttentionBackend,
    capabilities: Sequence[Capability],
    *,
    scratch_slot: int,
    max_model_len: int,
) -> ModelRunner:
    """Return what runs the target; its forward and the speculator's drafting may be captured.

    Args:
        config: all options.
        decoder: the target.
        speculator: sees the rows of each forward.
        attention: of the target's cache.
        capabilities: of each layer.
        scratch_slot: takes keys and values of rows of nobody.
        max_model_len: tokens of the longest request.

    Raises:
        ConfigError: graphs do not fit beside the KV cache.
    """
    resources, device = speculator.effective, decoder.device
    eager = EagerRunner(
        decoder, attention, resources.taps, speculator.observe_rows, resources.max_rows
    )
    lacking = [each.reason for each in capabilities if not each.takes_device_counts]
    limits = graph_limits(
        config,
        resources,
        takes_device_counts=device.type == "cuda" and not lacking,
        max_model_len=max_model_len,
    )
    if limits.rows == 0:
        if device.type == "cuda" and lacking and config.max_graph_rows != 0:
            logger.warning("no CUDA graphs, as attention cannot be captured: %s", lacking[0])
        return eager
    largest = max(limits.rows, limits.full_rows)
    graphs, embedding = Graphs(), decoder.embed_tokens.weight
    started, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
    try:
        runner = GraphRunner(decoder, eager, graphs, limits, embedding, scratch_slot)
        runner.capture()
        speculator.capture(graphs, limits)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"CUDA graphs of up to {largest} rows do not fit beside the KV cache; lower "
            f"max_graph_rows, max_num_seqs or gpu_memory_utilization"
        ) from error
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info(device)[0]
    kept = bytes_for_graphs(config, decoder, resources, limits)
    logger.info(
        "captured %d graphs of up to %d rows in %.1f s: %.2f GiB, and %.2f were kept for them",
        *(len(graphs), largest, time.perf_counter() - started, taken / _GIB, kept / _GIB),
    )
    if taken > kept:  # what rounds beyond the tiers need may be missing then
        logger.warning(
            "CUDA graphs take %.2f GiB more than was kept for them; if memory runs out later, "
            "lower max_graph_rows or gpu_memory_utilization",
            (taken - kept) / _GIB,
        )
    return runner
