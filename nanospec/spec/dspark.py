"""DSpark drafts a chain: one forward for the blocks of all requests, then token by token."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanospec.attention.backend import AttentionBackend
from nanospec.attention.batch import ForwardBatch, padded_tables
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.config import ModelConfig
from nanospec.cudagraph.buckets import row_tiers
from nanospec.cudagraph.graph_runner import GraphLimits, Graphs
from nanospec.device import to_device, to_device_together
from nanospec.errors import ConfigError
from nanospec.models.dspark import REGIMES, DSparkConfig
from nanospec.models.loader import load_drafter, resolve_model
from nanospec.spec.dspark_graphs import MODES, BlockGraphs, Blocks, blocks_of_nobody
from nanospec.spec.sampler import draw_drafts, sampling_rows
from nanospec.spec.speculator import Speculator, SpeculatorSetup
from nanospec.types import Draft, DraftRows, Pending, PlanKind, Request, Resources

logger = logging.getLogger(__name__)


class DSparkSpeculator(Speculator):
    """Drafts with a network that reads the target's features of all tokens before the root.

    Invariant: the drafter's cache holds the context of exactly the tokens whose keys the target's
    cache holds, in the same pages, so a prefix hit or a resumed request finds both. Rows of blocks
    go to slots from the root's on, which nobody reads before they are written again.
    """

    runs_ahead = True

    def __init__(self, setup: SpeculatorSetup):
        """Load the drafter.

        Raises:
            ConfigError: no drafter is named, or it drafts fewer tokens than are asked for.
            CheckpointError: it cannot be loaded, or is not one of this target.
        """
        if setup.config.draft is None:
            raise ConfigError("this speculator needs a drafter; pass --draft")
        assert setup.target is not None, "a drafter has a target"
        folder = resolve_model(setup.config.draft)
        self._config = DSparkConfig.from_folder(folder)
        self.usual_draft_len = self._usual_draft_len()
        self.knows_survival = self.knows_survival or self._config.has_confidence
        super().__init__(setup)
        self._max_len = self._config.layers.max_position_embeddings
        self._width = min(self.max_draft_len, self._config.block_size)  # slots of a block
        self._graphs: BlockGraphs | None = None
        if setup.model.max_position_embeddings > self._max_len:
            logger.warning(
                "the drafter knows %d positions, the target %d; requests longer than the first are "
                "decoded plainly from there on",
                self._max_len,
                setup.model.max_position_embeddings,
            )
        self._drafter = load_drafter(
            folder, self._config, setup.target, load_format=setup.config.load_format
        )
        self.calibration = torch.tensor(
            [self._config.calibration[regime] for regime in REGIMES], device=setup.device
        )  # [2, G, 2]; see REGIMES

    def _usual_draft_len(self) -> int:
        return self._config.block_size

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        length, block = self.max_draft_len, self._config.block_size
        if length > block:
            raise ConfigError(
                f"max_draft_len={length} exceeds the drafter's block of {block} tokens; "
                f"pass {block} or less"
            )
        return Resources(
            PlanKind.CHAIN, 1 + length, records_probs=True, taps=self._config.target_layer_ids
        )

    def cache_layers(self) -> ModelConfig:
        """See `Speculator.cache_layers`."""
        return self._config.layers

    def start(self, cache: PagedKVCache | None, attention: AttentionBackend | None) -> None:
        """See `Speculator.start`."""
        assert cache is not None and attention is not None, "a drafter has a cache"
        self._cache, self._attention = cache, attention
        head = self._drafter.markov_head
        if self.setup.device.type == "cuda" and head is not None and not head.can_fuse():
            logger.info(
                "greedy drafts are corrected step by step: markov_rank=%d is no power of two of at "
                "least 16, or too large",
                self._config.markov_rank,
            )

    def capture(self, graphs: Graphs, limits: GraphLimits) -> None:
        """See `Speculator.capture`: a graph drafts for a number of requests."""
        self._graphs = BlockGraphs(
            graphs,
            self._draft_blocks,
            max_blocks=self.setup.config.max_num_seqs,
            max_pages=limits.pages,
            width=self._width,
            vocab_size=self._config.layers.vocab_size,
            device=self.setup.device,
        )
        self._graphs.capture()

    def warm_up(self, max_requests: int) -> None:
        """See `Speculator.warm_up`. How attention is launched depends on the number of blocks."""
        if self._graphs is None:
            for count in row_tiers(max_requests):
                for mode in MODES:
                    blocks = blocks_of_nobody(mode, count, self.setup.device)
                    self._draft_blocks(blocks, self._width)

    def observe_rows(self, batch: ForwardBatch, features: Sequence[Tensor]) -> None:
        """Put the context of all rows into the cache, where the target's keys of them are."""
        self._drafter.store_context(features, batch.positions, self._cache, batch.slots)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`. A request past the drafter's own positions gets no draft."""
        device = self.setup.device
        roots = to_device([request.tokens[-1] for request in requests], device)
        rows = sampling_rows(requests, self._config.layers.vocab_size, device)
        return self.propose_ahead(requests, Pending(roots, torch.zeros_like(roots), rows))

    def propose_ahead(
        self, requests: Sequence[Request], pending: Pending
    ) -> Sequence[Draft | None]:
        """See `Speculator.propose_ahead`."""
        room = [max(min(r.max_drafts, self._max_len - r.most_tokens), 0) for r in requests]
        live = [index for index, own in enumerate(room) if own > 0]
        if not live:
            return [None] * len(requests)
        if len(live) < len(requests):
            pending = pending.at(to_device(live, self.setup.device))
        drafts: list[Draft | None] = [None] * len(requests)
        own = self._draft([requests[i] for i in live], [room[i] for i in live], pending)
        for place, draft in zip(live, own, strict=True):
            drafts[place] = draft
        return drafts

    def _draft(
        self, requests: Sequence[Request], room: Sequence[int], pending: Pending
    ) -> list[Draft]:
        """Draft for requests that have room for one token at least."""
        lengths = [min(own, self._width) for own in room]
        blocks = self._blocks(requests, lengths, pending)
        if self._graphs is not None:
            return self._graphs.run(blocks).drafts(lengths)
        return self._draft_blocks(blocks, self._width).drafts(lengths)

    def _blocks(
        self, requests: Sequence[Request], lengths: Sequence[int], pending: Pending
    ) -> Blocks:
        """Gather what drafting needs to know of requests."""
        device = self.setup.device
        known = [len(request.tokens) - 1 for request in requests]
        greedy, sampled = REGIMES.index("greedy"), REGIMES.index("sampled")
        regimes = [greedy if request.params.is_greedy else sampled for request in requests]
        shared = [request.shares_noise for request in requests]
        numbers = (known, lengths, regimes, shared)
        tables = padded_tables([request.pages for request in requests])
        starts, length, regime, shares_noise, tables_there = to_device_together(
            [*((each, torch.int64) for each in numbers), (tables, torch.int32)], device
        )
        # A stop that may not come yet may be drafted: the target rejects it, whatever q is.
        rows = pending.sampling
        rows = replace(rows, stops=rows.stops[:0], is_stop=rows.is_stop[:, :0])
        return Blocks(
            roots=pending.roots,
            starts=starts + pending.num_tokens,
            lengths=length,
            page_tables=tables_there,
            regime=regime,
            shares_noise=shares_noise,
            rows=rows,
        )

    def _draft_blocks(self, blocks: Blocks, width: int) -> DraftRows:
        """Draft `width` tokens for each block; those behind a block's length mean nothing.

        Does not synchronise; may be captured.
        """
        hidden = self._run_blocks(blocks, width)
        base = self._drafter.base_logits(hidden)
        tokens = blocks.roots.new_empty(len(blocks.roots), 1 + width)  # the root, then the drafts
        tokens[:, 0] = blocks.roots
        state, probs = self._drafter.first_state(len(tokens)), []
        shares_noise = blocks.shares_noise > 0
        for slot in range(width):
            known = (base[:, slot], hidden[:, slot], tokens[:, slot], state)
            if blocks.rows.is_argmax:
                state = self._drafter.greedy_token(*known, out=tokens[:, 1 + slot])
                continue
            logits, state = self._drafter.correct(*known)
            tokens[:, 1 + slot], q = draw_drafts(logits, blocks.rows, slot, shares_noise)
            if q is not None:
                probs.append(q)
        confidences = self._drafter.confidences(hidden, tokens[:, :-1])
        return DraftRows(
            tokens=tokens[:, 1:],
            probs=torch.stack(probs, dim=1) if probs else None,
            survival=None if confidences is None else self._survival(blocks, confidences),
        )

    def _survival(self, blocks: Blocks, logits: Tensor) -> Tensor:
        """Return how probably each draft and all before it are accepted, [n, width] fp32.

        The confidence of a slot does not know the token drawn there, so neither does the survival.

        Args:
            blocks: n.
            logits: [n, width] of the confidences.
        """
        scaling = self.calibration[blocks.regime, : logits.shape[1]]
        temperature, offset = scaling.unbind(-1)
        return (logits / temperature + offset).sigmoid().cumprod(dim=1)

    def _run_blocks(self, blocks: Blocks, width: int) -> Tensor:
        """Run blocks, filled up to so many slots with rows that no row of theirs sees.

        Returns:
            Hidden states [n, width, H]; behind a block's own slots there is anything.
        """
        device, size = self.setup.device, self._cache.page_size
        count, tables = len(blocks.roots), blocks.page_tables
        slot = torch.arange(width, device=device).expand(count, -1)
        is_own = slot < blocks.lengths[:, None]
        token_ids = torch.full((count, width), self._config.mask_token_id, device=device)
        token_ids[:, 0] = blocks.roots
        last = (blocks.lengths[:, None] - 1).clamp(min=0)
        positions = blocks.starts[:, None] + slot.minimum(last)
        page = tables.gather(1, (positions // size).clamp(max=tables.shape[1] - 1)).long()
        slots = torch.where(is_own, page * size + positions % size, self._cache.scratch_slot)
        batch = ForwardBatch(
            token_ids=token_ids.flatten(),
            positions=positions.flatten(),
            slots=slots.flatten(),
            qo_indptr=torch.arange(count + 1, dtype=torch.int32, device=device) * width,
            kv_lens=(blocks.starts + blocks.lengths).int(),
            page_tables=tables,
            logit_rows=blocks.roots[:0],
            max_rows=width,
            is_full=True,
        )
        self._attention.begin(batch)
        hidden: Tensor = self._drafter(batch.token_ids, batch.positions, self._attention)
        return hidden.view(count, width, -1)
