"""CUDA graphs of a DSpark drafter: the blocks of so many requests, from roots to drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanospec.cudagraph.buckets import row_tiers, tier_of
from nanospec.cudagraph.graph_runner import Graphs
from nanospec.params import SamplingRows
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

# Columns of blocks, and of how they are drawn; the int64 ones lie in one buffer, those in fp32 too.
OF_BLOCKS = ("roots", "starts", "lengths", "regime", "shares_noise")
INTEGERS = ("top_k", "seed", "position", "min_position")
FLOATS = ("temperature", "top_p", "min_p")


def blocks_of(mode: str, integers: Tensor, floats: Tensor, page_tables: Tensor) -> Blocks:
    """Return blocks that are drawn in one of `MODES`.

    Args:
        mode: its name.
        integers: [9, n] int64, `OF_BLOCKS` and `INTEGERS`.
        floats: [3, n] fp32, `FLOATS`.
        page_tables: [n, P] int32.
    """
    is_greedy, has_filters = MODES[mode]
    of_blocks, of_rows = integers[: len(OF_BLOCKS)], integers[len(OF_BLOCKS) :]
    stops = integers[0, :0]
    rows = SamplingRows(
        **dict(zip(INTEGERS, of_rows, strict=True)),
        **dict(zip(FLOATS, floats, strict=True)),
        stops=stops,
        is_stop=stops.expand(len(page_tables), 0).bool(),
        is_greedy=is_greedy,
        has_filters=has_filters,
    )
    columns = dict(zip(OF_BLOCKS, of_blocks, strict=True))
    return Blocks(**columns, page_tables=page_tables, rows=rows)


def blocks_of_nobody(mode: str, count: int, device: torch.device) -> Blocks:
    """Return n blocks that see no key and write to the scratch slot."""
    integers, floats = _columns(count, device)
    return blocks_of(mode, integers, floats, integers[:1].T.int())


def _columns(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the integers and floats of n blocks of nobody, see `blocks_of`."""
    num_integers = len(OF_BLOCKS) + len(INTEGERS)
    integers = torch.zeros(num_integers, count, dtype=torch.int64, device=device)
    return integers, torch.ones(len(FLOATS), count, device=device)


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
        self._integers, self._floats = _columns(max_blocks, device)
        self._tables = torch.zeros(max_blocks, max_pages, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_blocks, width, dtype=torch.int64, device=device)
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
        rows = blocks.rows
        integers = [getattr(blocks, name) for name in OF_BLOCKS]
        integers += [getattr(rows, name) for name in INTEGERS]
        self._integers[:, :count].copy_(torch.stack(integers))
        if count < tier:
            self._integers[:, count:tier].zero_()  # blocks of nobody, which see no key
        if not rows.is_greedy:
            floats = [getattr(rows, name) for name in FLOATS]
            self._floats[:, :count].copy_(torch.stack(floats))
        self._tables[:count, : blocks.page_tables.shape[1]].copy_(blocks.page_tables)
        self._graphs.replay(f"draft, {mode}", tier)
        return DraftRows(
            tokens=self._tokens[:count].clone(),
            probs=None if mode == "greedy" else self._probs[:count],
            survival=None if self._survival is None else self._survival[:count].clone(),
        )

    def _run(self, mode: str, count: int) -> None:
        """Draft for what `run` has left; what is captured."""
        columns = self._integers[:, :count], self._floats[:, :count]
        blocks = blocks_of(mode, *columns, self._tables[:count])
        found = self._draft(blocks, self._width)
        self._tokens[:count].copy_(found.tokens)
        if found.probs is not None:
            self._probs[:count].copy_(found.probs)
        if found.survival is not None:
            if self._survival is None:  # the first run, before anything is captured
                self._survival = torch.zeros_like(self._tokens, dtype=torch.float32)
            self._survival[:count].copy_(found.survival)
