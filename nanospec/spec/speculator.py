"""`Speculator`: what a way of guessing may change in a round, and the defaults of each hook.

A speculator of one's own overrides `resources` and `propose`; see `docs/round.md` for the hooks in
the order in which they are called.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanospec.attention.backend import AttentionBackend
from nanospec.attention.batch import ForwardBatch
from nanospec.attention.kv_cache import PagedKVCache
from nanospec.config import EngineConfig, ModelConfig
from nanospec.cudagraph.graph_runner import GraphLimits, Graphs
from nanospec.cudagraph.runner import TargetOutput
from nanospec.errors import ConfigError
from nanospec.models.decoder import Decoder
from nanospec.params import SamplingRows
from nanospec.spec.adaptive import Verdict, create_policy
from nanospec.spec.estimator import AcceptanceEstimator
from nanospec.spec.plan import build_plan
from nanospec.types import (
    AcceptResult,
    Budget,
    Capability,
    Draft,
    EngineView,
    PackedRows,
    Pending,
    PlanKind,
    Request,
    Resources,
    StepOutput,
    VerifyPlan,
)

logger = logging.getLogger(__name__)

# What a kernel serves: a kind of layer and an operation. There are
#   ("paged_attention", "verify")  a function (cache, num_heads) -> AttentionBackend
#   ("paged_kv", "commit")         a function like `kv_ops.move_kv`; where it has a method
#                                  `declines(layer) -> str`, a non-empty reason declines that layer
KernelKey = tuple[str, str]
VERIFY: KernelKey = ("paged_attention", "verify")
COMMIT: KernelKey = ("paged_kv", "commit")


@dataclass(frozen=True, slots=True)
class SpeculatorSetup:
    """What a speculator is built from."""

    config: EngineConfig
    model: ModelConfig  # of the target
    dtype: torch.dtype  # of the target
    device: torch.device
    target: Decoder | None = None  # its weights, which a drafter may share


def about(setup: SpeculatorSetup, speculator: str, max_rows: int = 1) -> dict[str, str]:
    """Return what the costs of a round depend on: a cost table of anything else is refused.

    Torch's version stands for Triton's, which comes with it; FlashInfer's is pinned. How nanospec
    itself has changed is not compared: measure anew after an upgrade.

    Args:
        setup: of the engine.
        speculator: its name.
        max_rows: of a request in a plan.
    """
    config, model, is_gpu = setup.config, setup.model, setup.device.type == "cuda"
    attention = config.attention
    if attention == "auto":
        attention = "triton" if is_gpu else "torch"
    is_ahead = config.run_ahead == "on" or (config.run_ahead == "auto" and is_gpu)
    return {
        "model": f"{model.architecture} {model.num_layers}x{model.hidden_size}, {model.vocab_size}",
        "mlp": str(model.intermediate_size),
        "heads": f"{model.num_heads} of {model.num_kv_heads} x {model.head_dim}",
        "device": torch.cuda.get_device_name(setup.device) if is_gpu else "cpu",
        "dtype": str(setup.dtype).removeprefix("torch."),
        "attention": attention,
        "max_graph_rows": str(config.graph_rows(max_rows) if is_gpu else 0),
        "run_ahead": "on" if is_ahead else "off",
        "speculator": speculator,
        "draft": str(config.draft and Path(config.draft).name),
        "max_draft_len": str(max_rows - 1),
        "torch": str(torch.__version__),
    }


class Speculator(ABC):
    """Guesses tokens after the root of each request.

    Invariant: drafts live on the requests, so preemption, abort and completion need no hook.
    """

    usual_draft_len = 7  # where the user asks for no other
    runs_ahead = False  # whether it has `propose_ahead`
    knows_survival = False  # whether its drafts' survivals are to be trusted as they are

    def __init__(self, setup: SpeculatorSetup):
        self.setup = setup
        self.effective = self.resources()  # lowered by `adapt`; plans may not exceed it
        learns = not self.knows_survival
        self.policy = create_policy(
            setup.config,
            self.max_draft_len,
            about(setup, type(self).__name__, self.effective.max_rows),
            learns=learns,
        )
        if self.policy.needs_survival and self.effective.kind is PlanKind.MASK:
            raise ConfigError(
                f"adaptive={setup.config.adaptive} ranks drafts by survival, which the rows of "
                f"{type(self).__name__}'s mask plans have not; pass adaptive=off"
            )
        estimates = self.policy.needs_survival and learns
        self.estimator = AcceptanceEstimator() if estimates else None

    @property
    def max_draft_len(self) -> int:
        """Draft rows of one request at most: what the user asks for, or what is usual."""
        asked = self.setup.config.max_draft_len
        return self.usual_draft_len if asked is None else asked

    def resources(self) -> Resources:
        """Declare, once, the most a plan will ask for; default: chains of `max_draft_len`."""
        return Resources(PlanKind.CHAIN, 1 + self.max_draft_len)

    def kernels(self) -> Mapping[KernelKey, Callable[..., Any]]:
        """Provide kernels that replace the engine's; default: none."""
        return {}

    def adapt(self, resources: Resources, capabilities: Sequence[Capability]) -> Resources:
        """Lower the resources to what every layer can verify; called once.

        Raises:
            ConfigError: the speculator cannot work with less; the default refuses for mask plans.
        """
        kind = min(resources.kind, *(each.kind for each in capabilities))
        if resources.kind is PlanKind.MASK and kind < PlanKind.MASK:
            reason = next(each.reason for each in capabilities if each.kind == kind)
            raise ConfigError(
                f"{type(self).__name__} needs mask plans, and the attention here verifies "
                f"{kind.name.lower()}s only ({reason}); use another attention or speculator"
            )
        takes_device_counts = all(each.takes_device_counts for each in capabilities)
        return replace(
            resources,
            kind=kind,
            max_rows=min(resources.max_rows, *(each.max_rows for each in capabilities)),
            needs_device_counts=resources.needs_device_counts and takes_device_counts,
        )

    def cache_layers(self) -> ModelConfig | None:
        """Return the shape of a drafter whose keys and values live in the same pages, if any."""
        return None

    def start(self, cache: PagedKVCache | None, attention: AttentionBackend | None) -> None:
        """Take the drafter's cache and attention, once they are allocated; default: nothing."""
        return

    def capture(self, graphs: Graphs, limits: GraphLimits) -> None:
        """Capture what is launched every round as CUDA graphs, where there are any; once.

        Args:
            graphs: `graphs.capture` takes a name, tiers, and a function that reads and writes
                buffers of the speculator's own.
            limits: what a batch may hold.
        """
        return

    def warm_up(self, max_requests: int) -> None:
        """Run once whatever of drafting was not captured, so that no round waits for a compiler.

        Called on a GPU, before there are requests; default: nothing.

        Args:
            max_requests: that may run at once.
        """
        return

    def admit_limit(self, view: EngineView) -> int | None:
        """Return how many requests may run, at least 1; None: as many as the engine allows."""
        del view
        return None

    def candidate_budget(self, view: EngineView) -> Budget:
        """Return how many drafts may be made for the next round; default: the policy's word."""
        return self.policy.candidate_budget(view, self.effective.max_rows - 1)

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """Choose how many drafts of each request this round verifies; default: the policy's word.

        For sampled drafts judged by rejection this may depend on the tokens before a draft, never
        on the draft itself or a later one.

        Args:
            requests: those that sample, whose `max_drafts` may be lowered.
            num_other_rows: rows of the forward that are no drafts.
            room: drafts that the forward can hold beside them, all requests together.
        """
        return self.policy.admit(requests, num_other_rows, room)

    def plan(self, requests: Sequence[Request]) -> VerifyPlan:
        """Choose what to verify of the requests' drafts: the roots and the first drafts of each.

        The default takes `max_drafts` of each, which is what the budget and the pages allow. A plan
        of one's own is read back and checked.

        Raises:
            PlanError: a draft is malformed or exceeds the resources.
        """
        return build_plan(
            requests,
            [request.num_planned for request in requests],
            resources=self.effective,
            vocab_size=self.setup.model.vocab_size,
            device=self.setup.device,
        )

    def observe_rows(self, batch: ForwardBatch, features: Sequence[Tensor]) -> None:
        """See the rows of a forward, before anything is accepted; default: nothing.

        Keys and values of a drafter that belong to the same tokens may be put beside the target's:
        what is not accepted is written again before it is read. Must not synchronise, and where
        there are CUDA graphs is captured as part of the forward.

        Args:
            batch: T rows.
            features: per tap of `resources`, [T, H]: the residual stream of all rows.
        """
        return

    def accept(
        self,
        plan: VerifyPlan,
        output: TargetOutput,
        roots: SamplingRows,
        packed: PackedRows,
    ) -> AcceptResult | None:
        """Choose what survives of a plan; None (the default) for `spec.accept`, which is lossless.

        Args:
            plan: what was verified, of R requests.
            output: logits [N, V] of the plan's packed rows.
            roots: [R] how the token after each root is sampled.
            packed: where the plan's rows are.
        """
        del plan, output, roots, packed
        return None

    def observe_step(self, step: StepOutput) -> None:
        """Learn from a round; default: nothing."""
        return

    def propose_ahead(
        self, requests: Sequence[Request], pending: Pending
    ) -> Sequence[Draft | None]:
        """Guess what follows the root of each request, where the device alone knows the roots.

        A speculator that `runs_ahead` is asked this in place of `propose`, and its next round is
        launched before this one is settled. Must not synchronise.

        Args:
            requests: R, whose `max_drafts` hold for the most tokens they may get.
            pending: what the rounds in flight give them.
        """
        raise NotImplementedError(f"{type(self).__name__} says it runs ahead, and cannot")

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """Guess what follows the root of each request, at most `max_drafts` rows of each."""


class NoSpeculator(Speculator):
    """Ordinary decoding: proposes nothing."""

    runs_ahead = True

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        return Resources(PlanKind.CHAIN, 1)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        return [None] * len(requests)

    def propose_ahead(
        self, requests: Sequence[Request], pending: Pending
    ) -> Sequence[Draft | None]:
        """See `Speculator.propose_ahead`."""
        del pending
        return [None] * len(requests)


def resolve_kernels(
    providers: Sequence[tuple[str, Mapping[KernelKey, Callable[..., Any]]]],
) -> dict[KernelKey, Callable[..., Any]]:
    """Merge the kernels of named providers; a later one wins, which is logged.

    Raises:
        ConfigError: a provider names an operation that does not exist.
    """
    table: dict[KernelKey, Callable[..., Any]] = {}
    for name, kernels in providers:
        for key, kernel in kernels.items():
            if key not in (VERIFY, COMMIT):
                raise ConfigError(
                    f"{name} provides a kernel for {key}; known are {VERIFY}, {COMMIT}"
                )
            if key in table:
                logger.info("%s overrides the kernel for %s", name, key)
            table[key] = kernel
    return table


def layer_capabilities(
    attention: AttentionBackend, commit: Callable[..., Any], num_layers: int
) -> list[Capability]:
    """Return what each layer can verify; where `commit` declines a layer, chains at most."""
    found = []
    for layer in range(num_layers):
        capability = attention.capability(layer)
        declines = getattr(commit, "declines", None)
        reason = declines(layer) if declines is not None else ""
        if reason:  # a chain needs no moves
            capability = Capability(
                min(capability.kind, PlanKind.CHAIN),
                capability.max_rows,
                capability.takes_device_counts,
                reason,
            )
        found.append(capability)
    return found


def adapted(speculator: Speculator, capabilities: Sequence[Capability]) -> Resources:
    """Let a speculator adapt to the layers, and log each reason for a lowering once."""
    wanted = speculator.effective
    effective = speculator.adapt(wanted, capabilities)
    if effective != wanted:
        for reason in dict.fromkeys(each.reason for each in capabilities if each.reason):
            logger.warning(
                "%s runs %ss of %d rows instead of %ss of %d: %s",
                type(speculator).__name__,
                effective.kind.name.lower(),
                effective.max_rows,
                wanted.kind.name.lower(),
                wanted.max_rows,
                reason,
            )
    return effective
