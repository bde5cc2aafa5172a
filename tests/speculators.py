"""Speculators for tests: random, adversarial, always right, and drawing from a known q."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanospec.attention.batch import ForwardBatch
from nanospec.cudagraph.runner import TargetOutput
from nanospec.engine.scheduler import Scheduler
from nanospec.spec import noise
from nanospec.spec.sampler import draw, sampling_rows
from nanospec.spec.speculator import Speculator
from nanospec.types import Draft, PlanKind, Request, Resources
from tests import helpers

SMALL = 5  # vocabulary of the tables; token 4 only starts prompts
TREE = [0, 0, 1, 1, 2, 3]


def table(seed: int, sharpness: float) -> Tensor:
    """Return logits [V, V] of what follows each token; 4 never comes, and 0 follows it surely."""
    logits = torch.randn(SMALL, SMALL, generator=torch.Generator().manual_seed(seed)) * sharpness
    logits[:, 4] = -torch.inf
    logits[4, 1:4] = -torch.inf
    return logits


P, Q = table(1, 1.2), table(2, 1.0)


class TableRunner:
    """A target that knows only the last token: logits are a row of a table."""

    def run(self, batch: ForwardBatch) -> TargetOutput:
        """See `ModelRunner.run`."""
        return TargetOutput(P[batch.token_ids[batch.logit_rows]], batch.num_tokens)


class SampledChain(Speculator):
    """Draws each draft from q given the one before, and records q."""

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        return Resources(PlanKind.CHAIN, 4)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        roots = sampling_rows(requests, SMALL, torch.device("cpu"))
        everyone = torch.arange(len(requests))
        token = torch.tensor([request.tokens[-1] for request in requests])
        tokens, probs = [], []
        for depth in range(3):
            q = Q[token].float().softmax(-1)
            token = draw(q, roots.at(everyone, torch.zeros_like(everyone)), noise.DRAFT + depth)
            tokens.append(token)
            probs.append(q)
        drawn, laws = torch.stack(tokens, 1).tolist(), torch.stack(probs, 1)
        return [
            self.draft(request, drawn[index], laws[index]) for index, request in enumerate(requests)
        ]

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size = request.max_drafts
        return Draft(tokens[:size], probs=probs[:size])


class SampledTree(Speculator):
    """Draws siblings from q without replacement: two below the root, two and one below them."""

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        return Resources(PlanKind.TREE, 7)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        roots = sampling_rows(requests, SMALL, torch.device("cpu"))
        position = roots.position
        rows = [torch.tensor([request.tokens[-1] for request in requests])]
        laws = []
        for parent in range(4):
            q = Q[rows[parent]].float().softmax(-1)
            gumbel = noise.gumbel(roots.seed, position, noise.DRAFT + parent, SMALL)
            order = (q.log() + gumbel).sort(dim=-1, descending=True).indices
            for rank in range(TREE.count(parent)):
                rows.append(order[:, rank])
                laws.append(q)
        tokens, probs = torch.stack(rows[1:], 1).tolist(), torch.stack(laws, 1)
        return [
            self.draft(request, tokens[index], probs[index])
            for index, request in enumerate(requests)
        ]

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size = request.max_drafts
        return Draft(tokens[:size], TREE[:size], probs=probs[:size])


CONFIDENCE = (0.9, 0.35, 0.75, 0.55, 0.8)  # of a draft after each token


class ConfidentChain(SampledChain):
    """The same chains, with a confidence that the token before each draft decides."""

    knows_survival = True

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size, alive, survival = request.max_drafts, 1.0, []
        for before in [request.tokens[-1], *tokens][:size]:
            alive *= CONFIDENCE[before]
            survival.append(alive)
        return Draft(tokens[:size], probs=probs[:size], survival=survival)


class PointMassTree(SampledTree):
    """The same trees without recorded probabilities: point masses."""

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        del probs
        return Draft(tokens[: request.max_drafts], TREE[: request.max_drafts])


class Mixed(SampledTree):
    """Sampled trees, point-mass trees and no drafts at all, by request, in one batch."""

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size = request.max_drafts
        kind = request.request_id % 3
        own = probs[:size] if kind == 0 else None
        return None if kind == 2 else Draft(tokens[:size], TREE[:size], probs=own)


class RandomDrafts(Speculator):
    """Random trees of random tokens, of every size from 0 to what is allowed."""

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        self._generator = torch.Generator().manual_seed(0)
        return Resources(PlanKind.TREE, 1 + self.max_draft_len)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        return [self._draft(request.max_drafts) for request in requests]

    def _draft(self, most: int) -> Draft:
        size = self._below(most + 1)
        parents = [self._below(row) for row in range(1, size + 1)]
        return Draft([self._below(self.setup.model.vocab_size) for _ in range(size)], parents)

    def _below(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self._generator))


class Oracle(Speculator):
    """Knows the continuation of each prompt; `wrong_at` says which of its drafts are spoilt."""

    continuations: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012 - set by the test
    wrong_at: frozenset[int] = frozenset()
    branches = False

    def resources(self) -> Resources:
        """See `Speculator.resources`."""
        kind = PlanKind.TREE if self.branches else PlanKind.CHAIN
        return Resources(kind, 1 + self.max_draft_len)

    def propose(self, requests: Sequence[Request]) -> Sequence[Draft | None]:
        """See `Speculator.propose`."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: Request) -> Draft | None:
        known = self.continuations[tuple(request.prompt_token_ids)]
        true = known[request.num_output : request.num_output + request.max_drafts]
        if not self.branches:
            vocab = self.setup.model.vocab_size
            return Draft([(t + (i in self.wrong_at)) % vocab for i, t in enumerate(true)])
        # A wrong leaf before every true token: the true path has to be moved to its place.
        tokens: list[int] = []
        parents: list[int] = []
        last = 0
        for token in true[: request.max_drafts // 2]:
            tokens += [(token + 1) % self.setup.model.vocab_size, token]
            parents += [last, last]
            last = len(tokens)
        return Draft(tokens, parents)


def oracle(
    continuations: dict[tuple[int, ...], list[int]], *, wrong_at: Sequence[int] = (), tree: bool
) -> type[Speculator]:
    """Return an oracle for some prompts."""
    values = {"continuations": continuations, "wrong_at": frozenset(wrong_at), "branches": tree}
    return type("OwnOracle", (Oracle,), values)


def run_tables(
    kind: type[Speculator],
    seeds: range,
    *,
    max_tokens: int = 4,
    page_size: int = 4,
    num_pages: int | None = None,
    adaptive: dict[str, str] | None = None,
    **params: object,
) -> tuple[list[Request], Scheduler]:
    """Run many requests, each with its own seed, together to their end."""
    ctx = helpers.make_context(
        TableRunner(),
        kind,
        num_pages=num_pages or 8 * len(seeds),
        page_size=page_size,
        vocab_size=SMALL,
        prefix_caching=False,
        max_num_seqs=len(seeds),
        max_num_batched_tokens=16 * len(seeds),
        **(adaptive or {}),
    )
    requests = []
    for index, seed in enumerate(seeds):
        options = helpers.greedy(max_tokens, **({"temperature": 1.0} | params))
        requests.append(
            helpers.make_request(
                [4],
                options,
                request_id=index,
                seed=seed,
                max_len=1 + max_tokens,
                shares_noise=False,
            )
        )
        ctx.scheduler.add(requests[-1])
    helpers.run_to_end(ctx)
    return requests, ctx.scheduler
