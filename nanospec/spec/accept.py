"""Which drafts survive, and the token that follows them. Lossless: the output is the target's.

A request whose drafts count as point masses follows the target's own draws: every row draws its
next token (the argmax, where it is greedy), and a draft is accepted where it equals the draw at its
parent. The output is then that of plain decoding, token for token, as each draw depends only on
(seed, output position, logits).

A request whose drafts were sampled from a recorded q is judged by rejection, child by child in
their order (Leviathan et al., arXiv:2211.17192; several children: Miao et al., arXiv:2305.09781,
here without replacement). At the row reached so far, with p its distribution and x the next child:

    accept x with probability min(1, p(x) / q(x)); if it is rejected,
    p becomes max(p - q, 0), normalised, and q loses x, normalised.

When no child is left, the next token is drawn from p. `accept_reference` is the specification,
`accept_triton` the same in one launch.
"""

import torch
from torch import Tensor

from nanospec.params import SamplingRows
from nanospec.spec import noise
from nanospec.spec.sampler import draw, probabilities, sample_at
from nanospec.types import AcceptResult, PackedRows, VerifyPlan


def accept(
    plan: VerifyPlan,
    logits: Tensor,
    roots: SamplingRows,
    packed: PackedRows,
) -> AcceptResult:
    """Walk down each request's drafts. Does not synchronise.

    Args:
        plan: what was verified.
        logits: [N, V] of the plan's packed rows.
        roots: [R] how the token after each root is sampled.
        packed: where the plan's rows are.
    """
    offsets = packed.offsets
    if plan.probs is None:
        targets = sample_at(logits, roots, packed.request, packed.depth)
        return _follow(plan, targets, offsets)
    rows = roots.at(packed.request, packed.depth)
    probs = probabilities(logits, rows)
    targets = draw(probs, rows, noise.TARGET)
    coins = noise.uniform(roots.seed, roots.position, noise.COIN, plan.max_rows)
    walk = accept_reference
    if logits.is_cuda:
        # Imported here: Triton takes long to import and a CPU needs none.
        from nanospec.spec import accept_triton

        walk = accept_triton.accept
    return walk(plan, probs, targets, coins, roots, offsets)


def _follow(plan: VerifyPlan, targets: Tensor, offsets: Tensor) -> AcceptResult:
    """Accept the drafts that equal the target's draws [N]; no probabilities are needed."""
    if targets.is_cuda and plan.num_reqs > 0:
        from nanospec.spec import accept_triton

        return accept_triton.follow(plan, targets, offsets)
    return follow_reference(plan, targets, offsets)


def follow_reference(plan: VerifyPlan, targets: Tensor, offsets: Tensor) -> AcceptResult:
    """See `accept`, where all drafts are point masses."""
    walk = _Walk(plan, offsets)
    for row in range(1, plan.max_rows):
        child = walk.is_child(row)
        walk.step(row, child & (plan.tokens[:, row] == targets[walk.packed_row]))
    return walk.end(targets[walk.packed_row])


def accept_reference(
    plan: VerifyPlan,
    probs: Tensor,
    targets: Tensor,
    coins: Tensor,
    roots: SamplingRows,
    offsets: Tensor,
) -> AcceptResult:
    """See `accept`.

    Args:
        plan: with q.
        probs: [N, V] fp32, p of every packed row.
        targets: [N] int64, the target's own draws.
        coins: [R, M] uniform numbers.
        roots: [R] how each request's next token is sampled.
        offsets: [R + 1] int64.
    """
    assert plan.probs is not None and plan.is_sampled is not None, "the plan has no q"
    walk = _Walk(plan, offsets)
    p = probs[walk.packed_row].clone()  # [R, V] what is left of p at the row reached
    q = torch.zeros_like(p)  # [R, V] what is left of q there
    is_first = torch.ones_like(plan.is_sampled)  # no child of the row reached was judged yet
    for row in range(1, plan.max_rows):
        child = walk.is_child(row)
        token = plan.tokens[:, row : row + 1]
        q = torch.where((child & is_first)[:, None], plan.probs[:, row - 1], q)
        is_first = is_first & ~child
        p_token, q_token = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        by_coin = (q_token > 0) & (coins[:, row] * q_token < p_token)
        by_draw = token[:, 0] == targets[walk.packed_row]
        accepted = child & torch.where(plan.is_sampled, by_coin, by_draw)
        rejected = (child & ~accepted & plan.is_sampled)[:, None]
        p = torch.where(rejected, _residual(p, q), p)
        q = torch.where(rejected, _without(q, token), q)
        walk.step(row, accepted)
        p = torch.where(accepted[:, None], probs[walk.packed_row], p)
        is_first = is_first | accepted
    drawn = draw(
        p, roots.at(torch.arange(plan.num_reqs, device=p.device), walk.depth), noise.TARGET
    )
    return walk.end(torch.where(plan.is_sampled, drawn, targets[walk.packed_row]))


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return max(p - q, 0) normalised, [R, V]; p where nothing is left (q equal to p, rounded)."""
    left = (p - q).clamp(min=0)
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, left / mass, p)


def _without(q: Tensor, token: Tensor) -> Tensor:
    """Return q [R, V] without tokens [R, 1], normalised; zero where nothing is left."""
    left = q.scatter(1, token, 0.0)
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, left / mass, 0.0)


class _Walk:
    """How far each request has come down its tree: a row, its depth and the path to it."""

    def __init__(self, plan: VerifyPlan, offsets: Tensor):
        self._plan = plan
        self._start = offsets[:-1]
        self.depth = torch.zeros_like(plan.num_rows)
        self._row = torch.zeros_like(plan.num_rows)
        self._path = torch.zeros_like(plan.tokens)
        self._tokens = torch.zeros_like(plan.tokens)

    @property
    def packed_row(self) -> Tensor:
        """[R] the packed row each request has reached."""
        return self._start + self._row

    def is_child(self, row: int) -> Tensor:
        """[R] whether this row is verified and a child of the one reached."""
        plan = self._plan
        return (plan.parents[:, row] == self._row) & (row < plan.num_rows)

    def step(self, row: int, accepted: Tensor) -> None:
        """Go down to this row where it is accepted [R]."""
        self._row = torch.where(accepted, row, self._row)
        at = self.depth[:, None]
        old = self._tokens.gather(1, at)
        drafted = self._plan.tokens[:, row : row + 1]
        self._tokens = self._tokens.scatter(1, at, torch.where(accepted[:, None], drafted, old))
        self.depth = self.depth + accepted
        at = self.depth[:, None]
        old = self._path.gather(1, at)
        self._path = self._path.scatter(
            1, at, torch.where(accepted[:, None], torch.full_like(old, row), old)
        )

    def end(self, next_tokens: Tensor) -> AcceptResult:
        """Close every path with its next token [R]."""
        tokens = self._tokens.scatter(1, self.depth[:, None], next_tokens[:, None])
        return AcceptResult(tokens=tokens, num_emitted=self.depth + 1, path=self._path)
