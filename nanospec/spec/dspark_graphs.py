"""CUDA graphs of a DSpark drafter: the blocks of so many requests, from roots to drafts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nanospec.cudagraph.buckets import row_tiers, tier_of
from nanospec.cudagraph.graph_runner import Graphs
from nanospec.spec.sampler import SamplingRows
from nanospec.types import DraftRows


@dataclass(frozen=True, slots=True)
class Blocks:
    """What drafting needs to know of n requests, on the device."""

    roots: Tensor  # [n] int64
    starts: Tensor  # [n] int64, tokens before each root
    lengths: Tensor  # [n] int64, tokens to draft
    page_tables: Tensor  # [n, P] int32
    regime: Tensor  # [n] int64, see `REGIMES`
    shares_noise: Tensor  # [n] int64, 1 where noise is shared with the target
    rows: SamplingRows  # [n] how the token after each root is sampled


# How drafts are drawn decides which kernels run: is_greedy and has_filters of the sampling rows.
MODES = {"greedy": (True, False), "sampled": (False, False), "filtered": (False, True)}

_COLUMNS = ("roots", "starts", "lengths", "regime", "shares_noise")  # of blocks, [n] int64
_DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "seed", "position")  # of rows, [n]


class BlockGraphs:
    """Drafts from graphs, one for each way to draw and tier of requests.

    Probabilities are valid until it runs again: the round that needs them is launched before.
    """

    def __init__(
        self,
        graphs: Graphs,
        draft: Callable[[Blocks, int], DraftRows],
        *,
        max_blocks: int,
        max_pages: int,
        width: int,
        vocab_size: int,
        device: torch.device,
    ):
        """Allocate what graphs read and write.

        Args:
            graphs: where to capture.
            draft: drafts so many tokens for each block.
            max_blocks: requests that may run at once.
            max_pages: of a request.
            width: tokens of a block.
            vocab_size: V.
            device: a GPU.
        """
        self._graphs, self._draft, self._width = graphs, draft, width
        self._tiers = row_tiers(max_blocks)

        def integers(*shape: int, dtype: torch.dtype = torch.int64, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        ones = torch.ones(max_blocks, device=device)
        self._blocks = Blocks(
            roots=integers(max_blocks),
            starts=integers(max_blocks),
            lengths=integers(max_blocks),
            page_tables=integers(max_blocks, max_pages, dtype=torch.int32),
            regime=integers(max_blocks),
            shares_noise=integers(max_blocks),
            rows=SamplingRows(
                temperature=ones,
                top_k=integers(max_blocks, value=vocab_size),
                top_p=ones.clone(),
                min_p=torch.zeros_like(ones),
                seed=integers(max_blocks),
                position=integers(max_blocks),
                min_position=integers(max_blocks),
                stops=integers(0),
                is_stop=integers(max_blocks, 0).bool(),
                is_greedy=False,
                has_filters=False,
            ),
        )
        self._tokens = integers(max_blocks, width)
        self._survival: Tensor | None = None
        self._probs = torch.zeros(max_blocks, width, vocab_size, device=device)

    def capture(self) -> None:
        """Capture every way to draw, for every tier."""
        for mode in MODES:
            self._graphs.capture(f"draft, {mode}", self._tiers, partial(self._run, mode))

    def run(self, blocks: Blocks) -> DraftRows:
        """Draft for blocks whose rows have no stops."""
        count = len(blocks.roots)
        tier = tier_of(count, self._tiers)
        flags = (blocks.rows.is_greedy, blocks.rows.has_filters and not blocks.rows.is_greedy)
        mode = next(name for name, each in MODES.items() if each == flags)
        assert tier is not None, "more blocks than requests may run"
        own = self._blocks
        for name in _COLUMNS:
            getattr(own, name)[:count].copy_(getattr(blocks, name))
        own.lengths[count:tier].zero_()  # blocks of nobody, which see no key
        own.starts[count:tier].zero_()
        own.page_tables[:count, : blocks.page_tables.shape[1]].copy_(blocks.page_tables)
        for name in _DRAWN_BY:
            getattr(own.rows, name)[:count].copy_(getattr(blocks.rows, name))
        self._graphs.replay(f"draft, {mode}", tier)
        return DraftRows(
            tokens=self._tokens[:count].clone(),
            probs=None if mode == "greedy" else self._probs[:count],
            survival=None if self._survival is None else self._survival[:count].clone(),
        )

    def _run(self, mode: str, count: int) -> None:
        """Draft for what `run` has left; what is captured."""
        own, (is_greedy, has_filters) = self._blocks, MODES[mode]
        whole = own.rows
        rows = replace(
            whole,
            **{name: getattr(whole, name)[:count] for name in (*_DRAWN_BY, "min_position")},
            is_stop=whole.is_stop[:count],
            is_greedy=is_greedy,
            has_filters=has_filters,
        )
        columns = {name: getattr(own, name)[:count] for name in (*_COLUMNS, "page_tables")}
        found = self._draft(Blocks(**columns, rows=rows), self._width)
        self._tokens[:count].copy_(found.tokens)
        if found.probs is not None:
            self._probs[:count].copy_(found.probs)
        if found.survival is not None:
            if self._survival is None:  # the first run, before anything is captured
                self._survival = torch.zeros_like(self._tokens, dtype=torch.float32)
            self._survival[:count].copy_(found.survival)
