"""DSpark drafts a chain: one forward for the blocks of all requests, then token by token."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from nanospec.attention.backend import AttentionBackend
from nanospec.attention.batch import batch_of_spans, slots_of
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.config import ModelConfig
from nanospec.errors import ConfigError
from nanospec.models.dspark import REGIMES, DSparkConfig
from nanospec.models.loader import load_drafter, resolve_model
from nanospec.spec.sampler import draw_drafts, sampling_rows
from nanospec.spec.speculator import Speculator, SpeculatorSetup
from nanospec.types import Draft, PlanKind, Request, Resources, StepOutput

logger = logging.getLogger(__name__)


class DSparkSpeculator(Speculator):
    """Drafts with a network that reads the target's features of all tokens before the root.

    Invariant: between rounds the drafter's cache holds the context of exactly the tokens that the
    target's cache holds, in the same pages, so a prefix hit or a resumed request finds both. Rows
    of blocks go to slots from the root's on, which nobody reads before they are written again.
    """

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

    def observe_step(self, step: StepOutput) -> None:
        """Put the context of the rows that were committed into the cache."""
        size, device = self._cache.page_size, self.setup.device
        spans = [(each.request, range(each.start, each.end)) for each in step.committed]
        positions = torch.tensor([at for _, span in spans for at in span]).to(device)
        slots = [slot for request, span in spans for slot in slots_of(request.pages, span, size)]
        where = torch.tensor(slots).to(device)
        for layer, (k, v) in enumerate(self._drafter.context(step.features, positions)):
            self._cache.store(layer, k, v, where)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`. A request past the drafter's own positions gets no draft."""
        room = [max(min(each.max_drafts, self._max_len - len(each.tokens)), 0) for each in requests]
        live = [index for index, own in enumerate(room) if own > 0]
        drafts: list[Draft | None] = [None] * len(requests)
        if live:
            own = [room[index] for index in live]
            for index, draft in zip(
                live, self._draft([requests[index] for index in live], own), strict=True
            ):
                drafts[index] = draft
        return drafts

    def _draft(self, requests: Sequence[Request], room: Sequence[int]) -> list[Draft]:
        """Draft for requests that have room for one token at least."""
        lengths = [min(own, self._config.block_size) for own in room]
        hidden = self._run_blocks(requests, lengths)
        base = self._drafter.base_logits(hidden)
        device = hidden.device
        rows = sampling_rows(requests, self._config.layers.vocab_size, device)
        shared = torch.tensor([request.shares_noise for request in requests]).to(device)
        tokens = torch.tensor([request.tokens[-1] for request in requests]).to(device)
        state = self._drafter.first_state(len(requests))
        drawn, probs, confidences = [], [], []
        for slot in range(max(lengths)):
            logits, confidence, state = self._drafter.correct(
                base[:, slot], hidden[:, slot], tokens, state
            )
            tokens, q = draw_drafts(logits, rows, slot, shared)
            drawn.append(tokens)
            if q is not None:
                probs.append(q)
            if confidence is not None:
                confidences.append(confidence)
        survival = self._survival(requests, confidences)
        q = torch.stack(probs, dim=1) if probs else None  # [n, slots, V]
        return [
            Draft(
                tokens=own[:length],
                probs=None if q is None else q[index, :length],
                survival=None if survival is None else survival[index, :length],
            )
            for index, (own, length) in enumerate(
                zip(torch.stack(drawn, dim=1).tolist(), lengths, strict=True)
            )
        ]

    def _survival(
        self, requests: Sequence[Request], confidences: Sequence[Tensor]
    ) -> Tensor | None:
        """Return how probably each draft and all before it are accepted, from confidence logits.

        [n, slots] fp32, on the device.

        The confidence of a slot does not know the token drawn there, so neither does the survival.
        """
        if not confidences:
            return None
        logits = torch.stack(list(confidences), dim=1)
        regime = torch.tensor(
            [REGIMES.index("greedy" if each.params.is_greedy else "sampled") for each in requests]
        ).to(logits.device)
        temperature, offset = self.calibration[regime, : logits.shape[1]].unbind(-1)
        scaled = logits / temperature + offset
        return scaled.sigmoid().cumprod(dim=1)

    def _run_blocks(self, requests: Sequence[Request], lengths: Sequence[int]) -> Tensor:
        """Run a block of so many slots for each request.

        Returns:
            Hidden states [n, max(lengths), H]; slots behind a block's own repeat its last one.
        """
        device, mask = self.setup.device, self._config.mask_token_id
        starts = [len(request.tokens) - 1 for request in requests]
        for request, start in zip(requests, starts, strict=True):
            assert request.kv_len == start, "the context ends before the root"
        token_ids = [
            token
            for request, length in zip(requests, lengths, strict=True)
            for token in [request.tokens[-1]] + [mask] * (length - 1)
        ]
        batch = batch_of_spans(
            [range(start, start + own) for start, own in zip(starts, lengths, strict=True)],
            [request.pages for request in requests],
            torch.tensor(token_ids).to(device),
            page_size=self._cache.page_size,
            is_full=True,
        )
        self._attention.begin(batch)
        hidden: Tensor = self._drafter(batch.token_ids, batch.positions, self._attention)
        width, first, rows = max(lengths), 0, []
        for length in lengths:
            rows.append([first + min(slot, length - 1) for slot in range(width)])
            first += length
        return hidden[torch.tensor(rows).to(device)]
