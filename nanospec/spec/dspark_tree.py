"""DSpark drafts a tree: the same blocks, but every node's token corrects the slot below it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanospec.cudagraph.buckets import row_tiers
from nanospec.cudagraph.graph_runner import GraphLimits, Graphs
from nanospec.params import GREEDY_TEMPERATURE, SamplingRows
from nanospec.spec.dspark import DSparkSpeculator
from nanospec.spec.dspark_graphs import blocks_of_nobody
from nanospec.spec.sampler import probabilities
from nanospec.types import Draft, Pending, PlanKind, Request, Resources


class DSparkTreeSpeculator(DSparkSpeculator):
    """Expands the most probable node first, until `max_draft_len` nodes are there.

    A node's children are the top tokens of the distribution that its own token gives; its survival
    is the product of the drafter's probabilities from the root to it, not calibrated. Tokens are
    chosen, not drawn, and are accepted where the target draws them: point masses, lossless at any
    temperature.
    """

    runs_ahead = False  # how many nodes a tree has is read
    knows_survival = True

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        taps = self._config.target_layer_ids
        return Resources(PlanKind.TREE, 1 + self.max_draft_len, taps=taps)

    def capture(self, graphs: Graphs, limits: GraphLimits) -> None:
        """See `Speculator.capture`: trees are grown eagerly."""
        return

    def warm_up(self, max_requests: int) -> None:
        """See `Speculator.warm_up`. How attention is launched depends on the number of blocks."""
        for count in row_tiers(max_requests):
            self._run_blocks(blocks_of_nobody("sampled", count, self.setup.device), self._width)

    def _usual_draft_len(self) -> int:
        return 2 * self._config.block_size + 2

    def _draft(
        self, requests: Sequence[Request], room: Sequence[int], pending: Pending
    ) -> list[Draft]:
        lengths = [min(own, self._width) for own in room]
        blocks = self._blocks(requests, lengths, pending)
        tokens, parents, survival = self._expand(
            self._run_blocks(blocks, self._width),
            _not_greedy(blocks.rows, self._config.layers.vocab_size),
            blocks.roots,
            blocks.lengths,
            max(room),
        )
        columns = zip(tokens.tolist(), parents.tolist(), survival.tolist(), strict=True)
        drafts = []
        for own, (token, parent, alive) in zip(room, columns, strict=True):
            # Where nothing can follow (a small vocabulary, a short block) nodes have no chance.
            size = sum(each > 0 for each in alive[:own])
            drafts.append(Draft(token[:size], parent[:size], survival=alive[:size]))
        return drafts

    def _expand(
        self, hidden: Tensor, rows: SamplingRows, roots: Tensor, depths: Tensor, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Grow n trees, best node first.

        Args:
            hidden: [n, slots, H].
            rows: [n] how the token after each root is sampled.
            roots: [n] int64.
            depths: [n] int64, how deep each tree may become.
            size: nodes of a tree.

        Returns:
            Tokens, parents (row numbers) and survival [n, size], the latter falling.
        """
        drafter, device = self._drafter, hidden.device
        base = drafter.base_logits(hidden)
        count = len(roots)
        everyone = torch.arange(count, device=device)
        best = min(size, base.shape[-1])  # of a node's children, no more can be taken
        # Row 0 is the root. A pool of candidates takes the children of every row.
        row_token = torch.zeros(count, size + 1, dtype=torch.int64, device=device)
        row_depth, row_parent = torch.zeros_like(row_token), torch.zeros_like(row_token)
        row_survival = torch.ones(count, size + 1, device=device)
        row_token[:, 0] = roots
        first = drafter.first_state(count)
        states = first.new_zeros(count, size, first.shape[-1])  # after each row
        pool_survival = torch.zeros(count, size * best, device=device)
        pool_token = torch.zeros(count, size * best, dtype=torch.int64, device=device)
        for row in range(size):
            depth = row_depth[:, row]
            slot = depth.clamp(max=hidden.shape[1] - 1)
            state = first if row == 0 else states[everyone, row_parent[:, row]]
            logits, states[:, row] = drafter.correct(
                base[everyone, slot], hidden[everyone, slot], row_token[:, row], state
            )
            probs, children = probabilities(logits, rows.at(everyone, depth)).topk(best)
            may_grow = (depth < depths)[:, None]
            pool = slice(row * best, (row + 1) * best)
            pool_survival[:, pool] = row_survival[:, row, None] * probs * may_grow
            pool_token[:, pool] = children
            alive, taken = pool_survival[:, : (row + 1) * best].max(dim=1)
            pool_survival[everyone, taken] = 0.0
            parent = taken // best
            row_token[:, row + 1] = pool_token[everyone, taken]
            row_parent[:, row + 1] = parent
            row_depth[:, row + 1] = row_depth[everyone, parent] + 1
            row_survival[:, row + 1] = alive
        return row_token[:, 1:], row_parent[:, 1:], row_survival[:, 1:]


def _not_greedy(rows: SamplingRows, vocab_size: int) -> SamplingRows:
    """Let greedy rows keep all tokens at temperature 1: which is best is uncertain, so graded."""
    greedy = rows.temperature < GREEDY_TEMPERATURE
    return replace(
        rows,
        temperature=rows.temperature.masked_fill(greedy, 1.0),
        top_k=rows.top_k.masked_fill(greedy, vocab_size),
        top_p=rows.top_p.masked_fill(greedy, 1.0),
        min_p=rows.min_p.masked_fill(greedy, 0.0),
        is_greedy=False,
    )
