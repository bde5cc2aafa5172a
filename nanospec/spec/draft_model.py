"""A second, smaller model of the same vocabulary drafts a chain, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanospec.attention.backend import AttentionBackend
from nanospec.attention.batch import batch_of_spans
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.config import ModelConfig
from nanospec.errors import ConfigError
from nanospec.models.loader import load_decoder, resolve_model
from nanospec.params import SamplingRows
from nanospec.spec.sampler import draw_drafts, sampling_rows
from nanospec.spec.speculator import Speculator, SpeculatorSetup
from nanospec.types import Draft, PlanKind, Request, Resources, StepOutput


class DraftModelSpeculator(Speculator):
    """Drafts with a decoder whose keys and values live in the same pages as the target's.

    Invariant: between rounds the drafter's cache holds the same tokens as the target's, as every
    committed row is run through both; so a prefix hit or a resumed request finds both.
    """

    def __init__(self, setup: SpeculatorSetup):
        """Load the drafter.

        Raises:
            ConfigError: no drafter is named, or it has another vocabulary.
        """
        super().__init__(setup)
        if setup.config.draft is None:
            raise ConfigError("speculator 'draft' needs a second model; pass --draft")
        folder = resolve_model(setup.config.draft)
        self._config = ModelConfig.from_folder(folder)
        if self._config.vocab_size != setup.model.vocab_size:
            raise ConfigError(
                f"the drafter {setup.config.draft} has a vocabulary of {self._config.vocab_size} "
                f"tokens, the target one of {setup.model.vocab_size}; they must be the same"
            )
        self._decoder = load_decoder(
            folder,
            self._config,
            dtype=setup.dtype,
            device=setup.device,
            load_format=setup.config.load_format,
        )
        self._attention: AttentionBackend | None = None

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        return Resources(PlanKind.CHAIN, 1 + self.max_draft_len, records_probs=True)

    def cache_layers(self) -> ModelConfig:
        """See `Speculator.cache_layers`."""
        return self._config

    def start(self, cache: PagedKVCache | None, attention: AttentionBackend | None) -> None:
        """See `Speculator.start`."""
        assert cache is not None and attention is not None, "a drafter has a cache"
        self._page_size = cache.page_size
        self._attention = attention

    def observe_step(self, step: StepOutput) -> None:
        """Run the rows that were committed through the drafter, which caches them."""
        spans = [(each.request, range(each.start, each.end)) for each in step.committed]
        tokens = [
            token for request, span in spans for token in request.tokens[span.start : span.stop]
        ]
        self._run(spans, torch.tensor(tokens).to(self.setup.device))

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`. A request past the drafter's own context gets no draft."""
        limit = self._config.max_position_embeddings
        room = [max(min(each.max_drafts, limit - len(each.tokens)), 0) for each in requests]
        roots = sampling_rows(requests, self._config.vocab_size, self.setup.device)
        tokens = torch.tensor([[each.tokens[-1]] for each in requests]).to(self.setup.device)
        probs: list[Tensor] = []
        for depth in range(max(room)):
            live = [index for index, own in enumerate(room) if own > depth]
            drawn, q = self._draw([requests[index] for index in live], live, tokens, roots, depth)
            index = torch.tensor(live).to(self.setup.device)
            column = tokens.new_zeros(len(requests)).index_copy(0, index, drawn)
            tokens = torch.cat((tokens, column[:, None]), dim=1)
            if q is not None:
                probs.append(q.new_zeros(len(requests), q.shape[1]).index_copy(0, index, q))
        return [
            _draft(tokens[index, 1 : 1 + own], [q[index] for q in probs[:own]])
            for index, own in enumerate(room)
        ]

    def _draw(
        self,
        requests: Sequence[Request],
        live: Sequence[int],
        tokens: Tensor,
        roots: SamplingRows,
        depth: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Draw the drafts of a depth: [n] int64, and q [n, V] unless all are greedy."""
        index = torch.tensor(live).to(tokens.device)
        ends = [len(request.tokens) + depth for request in requests]
        spans = [
            (request, range(end - 1, end)) for request, end in zip(requests, ends, strict=True)
        ]
        logits = self._decoder.logits(self._run(spans, tokens[index, depth]))
        shared = torch.tensor([request.shares_noise for request in requests]).to(tokens.device)
        return draw_drafts(logits, roots.at(index, 0), depth, shared)

    def _run(self, spans: Sequence[tuple[Request, range]], tokens: Tensor) -> Tensor:
        """Run tokens [T] of requests at their own positions; return hidden states [T, H]."""
        assert self._attention is not None, "start comes first"
        batch = batch_of_spans(
            [span for _, span in spans],
            [request.pages for request, _ in spans],
            tokens,
            page_size=self._page_size,
        )
        self._attention.begin(batch)
        hidden: Tensor = self._decoder(tokens, batch.positions, self._attention)[0]
        return hidden


def _draft(tokens: Tensor, probs: Sequence[Tensor]) -> Draft | None:
    if len(tokens) == 0:
        return None
    return Draft(tokens, probs=torch.stack(list(probs)) if probs else None)
