"""CUDA graphs: a forward is launched at once, whatever its requests, for the number of its rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from nanospec.attention.batch import LONG_ROWS, ForwardBatch
from nanospec.config import ModelConfig
from nanospec.cudagraph.buckets import row_tiers, tier_of
from nanospec.cudagraph.runner import EagerRunner, Target, TargetOutput

# Names of graphs.
_ANY, _LONE, _FULL = "forward", "forward, one row each", "forward, filled by prompts"
_GRAPH_BYTES = 8 * 2**20  # of one graph's nodes, about, for a decoder of 36 layers


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What a batch may hold to be replayed, and what it is likely to."""

    rows: int  # the largest tier; 0: no graphs
    full_rows: int  # of a forward that prompts fill; 0: a tier holds it, or it has no graph
    requests: int
    logits: int  # rows whose logits are wanted
    pages: int  # of a request
    plan_rows: int  # of a request's plan, for which attention is tuned
    has_words: bool  # whether there may be masked segments

    @property
    def segments(self) -> int:
        """How many there may be: the root of a request comes apart from a chunk of its prompt."""
        return 2 * self.requests


class Graphs:
    """Graphs of callables, by name and tier, in one pool of memory.

    Invariant: what a graph reads and writes lies in buffers of its owner. Memory of the pool is
    shared by all graphs, so what one leaves there the next one overwrites.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        """How many were captured."""
        return len(self._graphs)

    def capture(self, name: str, tiers: Sequence[int], run: Callable[[int], None]) -> None:
        """Capture `run(tier)` for each tier, the largest first, so that others fit its memory.

        Each runs once before, which compiles kernels and lets libraries allocate what they keep.
        """
        progress = tqdm(sorted(tiers, reverse=True), desc=name, unit="graph", disable=None)
        for tier in progress:
            run(tier)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                run(tier)
            self._graphs[name, tier] = graph

    def replay(self, name: str, tier: int) -> None:
        """Launch a graph."""
        self._graphs[name, tier].replay()


class GraphRunner:
    """See `ModelRunner`. Batches beyond the largest tier run eagerly, but for full ones.

    A graph of n rows serves any mix of plain, verified and prompt rows, in up to n segments; where
    plans may have more rows, another one serves segments of one row each, whose attention is
    launched otherwise. While prompts queue up, they fill one forward after the other, where drafts
    are not cut: one more graph, whose attention is that of prompts. The output is valid until the
    next run.
    """

    def __init__(
        self,
        target: Target,
        eager: EagerRunner,
        graphs: Graphs,
        limits: GraphLimits,
        embedding: Tensor,
        scratch_slot: int,
    ):
        """Allocate what graphs read and write.

        Args:
            target: a decoder.
            eager: runs it; its attention takes lengths from the device.
            graphs: where to capture.
            limits: of any batch that is replayed.
            embedding: [V, H], the target's.
            scratch_slot: takes keys and values of rows of nobody.
        """
        self._target, self._eager = target, eager
        self._graphs, self._limits = graphs, limits
        self._lent: ForwardBatch | None = None  # what is to be run next
        self._lent_to = _ANY  # by which graphs
        self._tiers, self._logit_tiers = row_tiers(limits.rows), row_tiers(limits.logits)
        self._lone_tiers = lone_tiers(limits)
        rows = max(limits.rows, limits.full_rows)
        segments = min(rows, limits.segments)

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=embedding.device)

        self._token_ids, self._positions, self._slots = integers(3, rows).unbind()
        self._slots.fill_(scratch_slot)
        self._words = integers(rows) if limits.has_words else None
        self._qo_indptr = integers(segments + 1, dtype=torch.int32)
        self._kv_lens = integers(segments, dtype=torch.int32)
        self._page_tables = integers(segments, limits.pages, dtype=torch.int32)
        self._logit_rows = integers(limits.logits)
        vocab_size, hidden_size = embedding.shape
        self._hidden = embedding.new_zeros(rows, hidden_size)
        self._logits = embedding.new_zeros(limits.logits, vocab_size)

    @property
    def tiers(self) -> Sequence[int]:
        """Rows of each graph, rising, but for that of full forwards."""
        return self._tiers

    def capture(self) -> None:
        """Capture every tier."""
        full = [self._limits.full_rows] if self._limits.full_rows > 0 else []
        self._graphs.capture(_FULL, full, partial(self._forward, LONG_ROWS))
        self._graphs.capture(_ANY, self._tiers, partial(self._forward, self._limits.plan_rows))
        self._graphs.capture(_LONE, self._lone_tiers, partial(self._forward, 1))
        self._graphs.capture("logits", self._logit_tiers, self._head)

    def buffers(self, num_rows: int, num_logits: int, max_rows: int) -> ForwardBatch | None:
        """See `ModelRunner.buffers`: what the graph of the smallest tier reads."""
        tier, full = tier_of(num_rows, self._tiers), self._limits.full_rows
        name, most = _ANY, self._limits.plan_rows
        if tier is None and num_rows == full:  # padding could take longer than launching does
            tier, name, most = full, _FULL, LONG_ROWS
        elif max_rows == 1 and tier in self._lone_tiers:
            name, most = _LONE, 1
        if tier is None or tier_of(num_logits, self._logit_tiers) is None:
            return None
        self._lent_to, self._lent = name, self._batch(tier, num_logits, most)
        return self._lent

    def run(self, batch: ForwardBatch) -> TargetOutput:
        """See `ModelRunner.run`. What `buffers` lent last is replayed, any other batch is not."""
        if batch is not self._lent:
            # Prompts, mostly. Whatever they are, attention is launched alike: none is compiled.
            return self._eager.run(replace(batch, max_rows=max(batch.max_rows, LONG_ROWS)))
        count = len(batch.logit_rows)
        self._graphs.replay(self._lent_to, batch.num_tokens)
        if count > 0:
            tier = tier_of(count, self._logit_tiers)
            assert tier is not None, "buffers are lent within the tiers"
            self._graphs.replay("logits", tier)
        return TargetOutput(self._logits[:count], batch.num_tokens)

    def _batch(self, tier: int, num_logits: int, max_rows: int) -> ForwardBatch:
        """Return the start of the buffers.

        What the host knows of a batch is not in it, as it differs from replay to replay: `max_rows`
        is what attention was launched for, chunks may be longer, and segments with words are not
        counted. Attention that can be captured reads both on the device.
        """
        segments = min(tier, self._limits.segments)
        return ForwardBatch(
            token_ids=self._token_ids[:tier],
            positions=self._positions[:tier],
            slots=self._slots[:tier],
            qo_indptr=self._qo_indptr[: segments + 1],
            kv_lens=self._kv_lens[:segments],
            page_tables=self._page_tables[:segments],
            logit_rows=self._logit_rows[:num_logits],
            max_rows=max_rows,
            words=None if self._words is None else self._words[:tier],
        )

    def _forward(self, max_rows: int, tier: int) -> None:
        """Run the target on what the buffers hold; what is captured."""
        self._hidden[:tier].copy_(self._eager.hidden(self._batch(tier, 0, max_rows)))

    def _head(self, tier: int) -> None:
        """Map the wanted rows of what `_forward` has left to logits; what is captured."""
        self._target.logits(self._hidden[self._logit_rows[:tier]], out=self._logits[:tier])


def lone_tiers(limits: GraphLimits) -> list[int]:
    """Return the tiers that requests with one row each may need graphs of their own for."""
    if limits.plan_rows == 1:
        return []
    tiers = row_tiers(limits.rows)
    largest = tier_of(min(limits.requests, limits.rows), tiers)
    return [tier for tier in tiers if largest is not None and tier <= largest]


def graph_bytes(limits: GraphLimits, model: ModelConfig, itemsize: int, num_drafts: int) -> int:
    """Return about how much memory graphs take, buffers included; see `docs/results/graphs.md`.

    Args:
        limits: of the target's graphs.
        model: the target.
        itemsize: bytes of one of its weights.
        num_drafts: drafts of all requests that are captured with what they are drawn from.
    """
    if limits.rows == 0:
        return 0
    width, vocab_size = model.hidden_size, model.vocab_size
    rows = max(limits.rows, limits.full_rows)
    buffers = rows * width + limits.logits * vocab_size
    # What a layer holds at once of each row: the residual stream, heads, both halves of the MLP.
    activations = rows * (6 * width + 4 * model.intermediate_size)
    num_graphs = len(row_tiers(limits.rows)) + len(row_tiers(limits.logits))
    num_graphs += len(lone_tiers(limits)) + (limits.full_rows > 0)
    if num_drafts > 0:  # for each way to draw
        num_graphs += 3 * len(row_tiers(limits.requests))
    # Of a draft: logits in 16 bits, q twice in 32; and for one draft of each request at a time ten
    # times as much as q, which is what filters needed when they sorted: more than they do now.
    drafts = num_drafts * vocab_size * (itemsize + 2 * 4 + 10 * 4 // max(limits.plan_rows - 1, 1))
    return (buffers + activations) * itemsize + drafts + num_graphs * _GRAPH_BYTES
