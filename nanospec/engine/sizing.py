"""How many KV pages fit beside everything else that is live during the largest step."""

import dataclasses
import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from nanospec.attention.backend import create_attention
from nanospec.attention.batch import ForwardBatch, build_batch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.config import CAPTURED, PROMPT_ROWS, EngineConfig, ModelConfig
from nanospec.cudagraph.graph_runner import GraphLimits, graph_bytes
from nanospec.cudagraph.runner import EagerRunner
from nanospec.errors import ConfigError
from nanospec.models.decoder import Decoder
from nanospec.params import SamplingRows
from nanospec.spec.sampler import sample
from nanospec.types import PlanKind, Resources

logger = logging.getLogger(__name__)

_GIB = 2**30
_MAX_CPU_CACHE_BYTES = 4 * _GIB  # a default, not a limit: --kv-cache-gib takes more


def new_cache(
    config: EngineConfig, model: ModelConfig, num_pages: int, like: Tensor
) -> PagedKVCache:
    """Allocate a cache of so many pages for a model's layers, of the dtype and device of `like`."""
    return PagedKVCache(
        num_layers=model.num_layers,
        num_pages=num_pages,
        page_size=config.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=like.dtype,
        device=like.device,
    )


def count_pages(
    config: EngineConfig,
    decoder: Decoder,
    models: Sequence[ModelConfig],
    resources: Resources,
    max_model_len: int,
) -> int:
    """Return how many KV pages to allocate.

    On a GPU a dummy step at the largest batch is run first, so that weights, activations, logits,
    draft probabilities and what the sampler holds are all counted.

    Args:
        config: page size, limits and memory to use.
        decoder: the target.
        models: whose layers share the pages: the target, and a drafter if there is one.
        resources: what a plan may ask for.
        max_model_len: tokens of the longest request.

    Returns:
        At least one page, and enough for `max_model_len` tokens if the user asked for a length.

    Raises:
        ConfigError: too few pages fit.
    """
    numbers = sum(2 * each.num_layers * each.num_kv_heads * each.head_dim for each in models)
    page_bytes = numbers * config.page_size * decoder.dtype.itemsize
    on_gpu = decoder.device.type == "cuda"
    try:
        budget = _cache_bytes(config, decoder, resources)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no KV page fits: the largest step alone exceeds the GPU's memory; {_lower(on_gpu)}"
        ) from error
    num_fitting = max(int(budget // page_bytes), 0)
    num_needed = -(-max_model_len // config.page_size)
    if num_fitting == 0 or (num_fitting < num_needed and config.max_model_len is not None):
        longest = num_fitting * config.page_size
        shorter = f"lower max_model_len to at most {longest}, or " if longest else ""
        raise ConfigError(
            f"{num_fitting} KV pages of {config.page_size} tokens fit in the "
            f"{max(budget, 0) / _GIB:.3g} GiB there are for them, but one request of "
            f"max_model_len={max_model_len} tokens needs {num_needed} "
            f"({num_needed * page_bytes / _GIB:.3g} GiB); {shorter}{_lower(on_gpu)}"
        )
    # More than all requests at their longest could never be held at once.
    num_pages = min(num_fitting, config.max_num_seqs * num_needed)
    logger.info(
        "KV cache: %d pages of %d tokens, %.2f GiB",
        num_pages,
        config.page_size,
        num_pages * page_bytes / _GIB,
    )
    return num_pages


def _lower(on_gpu: bool) -> str:
    if not on_gpu:
        return "raise kv_cache_gib"
    return (
        "lower max_num_seqs or max_num_batched_tokens, "
        "or raise kv_cache_gib or gpu_memory_utilization"
    )


def _cache_bytes(config: EngineConfig, decoder: Decoder, resources: Resources) -> float:
    """Return the bytes the cache may take."""
    wanted = None if config.kv_cache_gib is None else config.kv_cache_gib * _GIB
    if decoder.device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted is not None and wanted > memory:
            given = f"kv_cache_gib={config.kv_cache_gib}"
            raise ConfigError(f"{given} exceeds this machine's {memory / _GIB:.3g} GiB; lower it")
        return min(_MAX_CPU_CACHE_BYTES, memory / 4) if wanted is None else wanted
    free_for_cache = _free_after_largest_step(config, decoder, resources)
    if wanted is not None and wanted > free_for_cache:
        raise ConfigError(
            f"kv_cache_gib={config.kv_cache_gib} does not fit: {free_for_cache / _GIB:.3g} GiB are "
            f"left beside weights and the largest step; lower it, max_num_seqs or "
            f"max_num_batched_tokens, or raise gpu_memory_utilization"
        )
    return free_for_cache if wanted is None else wanted


def _free_after_largest_step(config: EngineConfig, decoder: Decoder, resources: Resources) -> float:
    """Return the GPU bytes that nothing needs even during the largest step."""
    device = decoder.device
    torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    by_others = total - free - torch.cuda.memory_reserved(device)
    cache_bytes = run_largest_step(config, decoder, resources)
    peak = torch.cuda.max_memory_reserved(device) - cache_bytes
    torch.cuda.empty_cache()
    captures = config.attention in CAPTURED
    limits = graph_limits(config, resources, takes_device_counts=captures)
    in_graphs = bytes_for_graphs(config, decoder, resources, limits)
    return config.gpu_memory_utilization * total - by_others - peak - in_graphs


def bytes_for_graphs(
    config: EngineConfig, decoder: Decoder, resources: Resources, limits: GraphLimits
) -> int:
    """Return how much memory is kept for graphs, which need the cache to be captured."""
    num_drafts = config.max_num_seqs * (resources.max_rows - 1) if resources.records_probs else 0
    return graph_bytes(limits, decoder.config, decoder.dtype.itemsize, num_drafts)


def graph_limits(
    config: EngineConfig, resources: Resources, *, takes_device_counts: bool, max_model_len: int = 0
) -> GraphLimits:
    """Return what graphs are captured for.

    Args:
        config: `max_graph_rows` and limits of batches.
        resources: what a plan may ask for.
        takes_device_counts: whether attention can be captured at all.
        max_model_len: tokens of the longest request.
    """
    plan_rows = resources.max_rows
    most = min(config.max_num_seqs * plan_rows, config.forward_rows(plan_rows))
    rows, full_rows = config.graph_rows(plan_rows), config.forward_rows(plan_rows)
    # Larger forwards take the GPU longer than their launch takes the host, and graphs much memory.
    has_full = config.max_graph_rows is None and rows < full_rows <= rows + PROMPT_ROWS
    return GraphLimits(
        rows=rows if takes_device_counts else 0,
        full_rows=full_rows if takes_device_counts and has_full else 0,
        requests=config.max_num_seqs,
        logits=min(rows, most),
        # A round in flight, the next and its drafts may all reach beyond the end.
        pages=-(-(max_model_len + 3 * plan_rows) // config.page_size),
        plan_rows=plan_rows,
        has_words=resources.kind > PlanKind.CHAIN,
    )


def run_largest_step(config: EngineConfig, decoder: Decoder, resources: Resources) -> int:
    """Run as many rows as a forward may have, of `max_num_seqs` requests; sample with every filter.

    Every row that a plan may hold is sampled, with the draft probabilities alive beside.

    Returns:
        The bytes of the temporary cache this took.
    """
    most = config.forward_rows(resources.max_rows)
    batch = _largest_batch(config, most, decoder.device)
    num_pages = int(batch.page_tables.max()) + 1
    weight = decoder.embed_tokens.weight
    cache = new_cache(config, decoder.config, num_pages, weight)
    # Draft probabilities are there twice: as the drafter leaves them, and padded in the plan.
    num_drafts = resources.max_rows - 1 if resources.records_probs else 0
    shape = (2, config.max_num_seqs, num_drafts, decoder.config.vocab_size)
    draft_probs = torch.empty(shape, device=weight.device)
    attention = create_attention(config.attention, cache, decoder.config.num_heads)
    num_rows = min(config.max_num_seqs * resources.max_rows, most)
    batch = dataclasses.replace(batch, logit_rows=torch.arange(num_rows, device=weight.device))
    logits = EagerRunner(decoder, attention, resources.taps).run(batch).logits
    ones = torch.ones(len(logits), device=decoder.device)
    rows = SamplingRows(
        temperature=ones,
        top_k=ones.long() * 50,
        top_p=ones * 0.9,
        min_p=ones * 0.01,
        seed=ones.long(),
        position=ones.long(),
        min_position=ones.long(),
        stops=ones[:0].long(),
        is_stop=ones[:, None][:, :0].bool(),
        is_greedy=False,
        has_filters=True,
    )
    sample(logits, rows)
    del draft_probs
    return cache.k.nbytes + cache.v.nbytes


def _largest_batch(config: EngineConfig, num_tokens: int, device: torch.device) -> ForwardBatch:
    num_reqs = config.max_num_seqs
    ends = [num_tokens * (index + 1) // num_reqs for index in range(num_reqs)]
    qo_lens = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    tables: list[list[int]] = []
    slots: list[int] = []
    for qo_len in qo_lens:
        first = sum(len(table) for table in tables)
        tables.append(list(range(first, first - (-qo_len // config.page_size))))
        slots += range(first * config.page_size, first * config.page_size + qo_len)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    slots_of_rows = torch.tensor(slots, device=device)
    return build_batch(zeros, zeros, slots_of_rows, qo_lens, qo_lens, tables, zeros[:0])
