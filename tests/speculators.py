"""Speculators for tests: random, adversarial, always right, and drawing from a known q."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanospec.attention.batch import ForwardBatch
from nanospec.cudagraph.runner import TargetOutput
from nanospec.engine.round import speculative_round
from nanospec.engine.scheduler import Scheduler
from nanospec.spec import noise
from nanospec.spec.adaptive import Policy, Verdict
from nanospec.spec.sampler import draw, sampling_rows
from nanospec.spec.speculator import Speculator
from nanospec.types import Draft, EngineView, PlanKind, Request, Resources
from tests import helpers

SMALL = 5  # vocabulary of the tables; token 4 only starts prompts
TREE = [0, 0, 1, 1, 2, 3]


def table(seed: int, sharpness: float) -> Tensor:
    """Return logits [V, V] of what follows each token; 4 never comes, and 0 follows it surely."""
    logits = torch.randn(SMALL, SMALL, generator=torch.Generator().manual_seed(seed)) * sharpness
    logits[:, 4] = -torch.inf
    logits[4, 1:4] = -torch.inf
    return logits


def coin(first: float) -> Tensor:
    """Return logits [V, V] of a coin: after any token comes 0 with this probability, or else 1."""
    law = torch.tensor([first, 1 - first, 0.0, 0.0, 0.0])
    return law.log().repeat(SMALL, 1)


P, Q = table(1, 1.2), table(2, 1.0)


class TableRunner:
    """A target that knows only the last token: logits are a row of a table."""

    def buffers(self, num_rows: int, num_logits: int, max_rows: int) -> ForwardBatch | None:
        """See `ModelRunner.buffers`."""
        return None

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


class TiedChain(SampledChain):
    """The same chains; all drafts of all requests are equally trusted."""

    knows_survival = True

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size = request.max_drafts
        return Draft(tokens[:size], probs=probs[:size], survival=[0.9] * size)


class PaperChain(SampledChain):
    """As in DSpark's appendix A, what the last draft but one is decides how good the last one is.

    The last one has confidence 0.9 after a 0 and 0 after anything else, all before it have 0.8.
    """

    knows_survival = True
    num_drafts = 2

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size = min(request.max_drafts, self.num_drafts)
        survival = [0.8 ** (place + 1) for place in range(size)]
        if size == self.num_drafts:
            survival[-1] = survival[-2] * (0.9 if tokens[size - 2] == 0 else 0.0)
        return Draft(tokens[:size], probs=probs[:size], survival=survival)


class LongPaperChain(PaperChain):
    """The same with one draft more, so that there is one to verify where the last is bad."""

    num_drafts = 3


TRUST = (0.6, 0.9, 0.1, 0.1, 0.8)  # in a tree, of the first sibling after each token


class ConfidentTree(SampledTree):
    """The same trees, with confidences that the tokens before each draft decide.

    A sibling that was drawn second knows the first one too, and is the less trusted the more that
    one is. So survival falls along a path, and falls and rises again in the order of the draws.
    """

    knows_survival = True

    def draft(self, request: Request, tokens: list[int], probs: Tensor) -> Draft | None:
        """Return the draft of a request."""
        size = request.max_drafts
        rows, alive = [request.tokens[-1], *tokens], [1.0]
        for row, parent in enumerate(TREE[:size], start=1):
            first = TREE.index(parent) + 1
            known = rows[parent] if row == first else rows[first]
            trust = TRUST[known] if row == first else 1 - TRUST[known]
            alive.append(alive[parent] * trust)
        return Draft(tokens[:size], TREE[:size], probs=probs[:size], survival=alive[1:])


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


class InGroups(Policy):
    """As many engines of a few requests as there are, which share forwards and nothing else.

    Each group has a policy of its own, in which the drafts of one request weigh as much as they
    can; and thousands of draws take seconds. For drafts on the host, whose counts are `max_drafts`.
    """

    needs_survival = True

    def __init__(self, new: Callable[[], Policy], size: int):
        self._new, self._size = new, size  # a policy, and how many requests it is for
        self._policies: dict[int, Policy] = {}

    def admit(self, requests: Sequence[Request], num_other_rows: int, room: int) -> Verdict:
        """See `Policy.admit`."""
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.request_id // self._size, []).append(request)
        for name, members in groups.items():
            policy = self._policies.get(name)
            if policy is None:
                policy = self._policies[name] = self._new()
            else:  # what an engine would have asked before these drafts were made
                view = EngineView(len(members), 0, 100, 4)
                most = max(member.max_drafts for member in members)
                most = policy.candidate_budget(view, most).max_rows_per_request - 1
                for member in members:
                    member.max_drafts = min(member.max_drafts, most)
            policy.admit(members, len(members), room)
        return super().admit(requests, num_other_rows, room)


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
    beyond: int = 0,
    page_size: int = 4,
    num_pages: int | None = None,
    adaptive: dict[str, str] | None = None,
    policy: Callable[[], Policy] | None = None,
    **params: object,
) -> tuple[list[Request], Scheduler]:
    """Run many requests, each with its own seed, together to their end.

    Args:
        kind: of the speculator.
        seeds: of the requests.
        max_tokens: of each, at least.
        beyond: tokens that might follow and are not waited for. Nobody gets more drafts than tokens
            may still come: with 4 of these and no more even the first tree is two rows.
        page_size: tokens.
        num_pages: None: enough.
        adaptive: options of the config.
        policy: makes one to take the place of that which `adaptive` names.
        params: of sampling.
    """
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
    if policy is not None:
        ctx.speculator.policy = policy()
    requests = []
    for index, seed in enumerate(seeds):
        options = helpers.greedy(max_tokens + beyond, **({"temperature": 1.0} | params))
        requests.append(
            helpers.make_request(
                [4],
                options,
                request_id=index,
                seed=seed,
                max_len=1 + max_tokens + beyond,
                shares_noise=False,
            )
        )
        ctx.scheduler.add(requests[-1])
    while ctx.scheduler.has_work:
        speculative_round(ctx, ctx.scheduler.schedule())
        for request in requests:
            if request.num_output >= max_tokens and not request.is_finished:
                ctx.scheduler.finish(request, "abort")
    assert ctx.scheduler.pages.num_free == ctx.scheduler.pages.num_pages
    return requests, ctx.scheduler
