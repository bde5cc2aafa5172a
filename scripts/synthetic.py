"""A DSpark drafter whose drafts are accepted by coin, for timing with random weights.

Every request has a probability of its own, drawn from a Beta distribution around a mean by its
seed, or all have the mean: at every slot it is both the confidence and the coin. Everything is
computed as ever, but the output means nothing.
"""

import torch
from torch import Tensor

from nanospec.cudagraph.runner import TargetOutput
from nanospec.params import SamplingRows
from nanospec.spec.dspark import DSparkSpeculator
from nanospec.spec.dspark_graphs import Blocks
from nanospec.spec.sampler import sample_at
from nanospec.spec.speculator import SpeculatorSetup
from nanospec.types import AcceptResult, PackedRows, VerifyPlan

_TABLE = 4096  # probabilities, taken by seed


class SyntheticDSpark(DSparkSpeculator):
    """Accepts draft k of a request if its first k coins all show heads."""

    mean = 0.847  # of the probabilities; set on a subclass, like the next
    concentration: float | None = 20.0  # of the Beta distribution; None: all are the mean

    def __init__(self, setup: SpeculatorSetup):
        super().__init__(setup)
        torch.manual_seed(0)
        self._probabilities = torch.full((_TABLE,), self.mean, device=setup.device)
        if self.concentration is not None:
            heads = torch.tensor(self.mean * self.concentration)
            tails = torch.tensor((1 - self.mean) * self.concentration)
            law = torch.distributions.Beta(heads, tails)
            self._probabilities = law.sample((_TABLE,)).to(setup.device)

    def accept(
        self, plan: VerifyPlan, output: TargetOutput, roots: SamplingRows, packed: PackedRows
    ) -> AcceptResult | None:
        """See `Speculator.accept`. Targets are drawn, so that this costs what it does."""
        if plan.max_rows == 1:
            return None  # nothing is tossed for; what a real drafter costs then
        targets = sample_at(output.logits, roots, packed.request, packed.depth)
        own = self._probabilities[roots.seed % _TABLE]
        slot = torch.arange(plan.max_rows, device=own.device)
        heads = torch.rand(len(own), plan.max_rows - 1, device=own.device) < own[:, None]
        exists = slot[1:] < plan.num_rows[:, None]
        accepted = (heads & exists).long().cumprod(dim=1).sum(dim=1)
        last = targets[(packed.offsets[:-1] + accepted).clamp(max=len(targets) - 1)]
        tokens = torch.cat((plan.tokens[:, 1:], last[:, None]), dim=1)
        tokens = torch.where(slot == accepted[:, None], last[:, None], tokens)
        path = slot.expand(len(own), -1).contiguous()
        return AcceptResult(tokens=tokens, num_emitted=accepted + 1, path=path)

    def _survival(self, blocks: Blocks, logits: Tensor) -> Tensor:
        own = self._probabilities[blocks.rows.seed % _TABLE]
        return own[:, None].expand(logits.shape).cumprod(dim=1)
