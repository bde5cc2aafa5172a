"""Runs every kind of round once at start-up, so that no later one waits for a compiler.

Knows what a round launches, but no speculator: nothing is drafted, learnt or cached by it. Keys and
values go to the scratch page.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanospec.cudagraph.buckets import row_tiers
from nanospec.engine.answer import sum_up
from nanospec.engine.packing import pack
from nanospec.engine.round import RoundContext, move_accepted
from nanospec.params import SamplingParams
from nanospec.spec.accept import accept
from nanospec.spec.budget import admit
from nanospec.spec.plan import build_plan
from nanospec.spec.sampler import draw_drafts, sampling_rows
from nanospec.text import TextStream
from nanospec.types import Draft, PlanKind, Request, Resources, Segment

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, min_tokens=1),
)


def warm_up(
    ctx: RoundContext,
    resources: Resources,
    vocab_size: int,
    *,
    max_rows: int,
    max_num_seqs: int,
    max_model_len: int,
) -> None:
    """Launch rounds of chains and trees, judged by q and by equality, and the longest of prompts.

    Args:
        ctx: of the engine; its scheduler is left alone.
        resources: what plans may ask for.
        vocab_size: V.
        max_rows: of a forward.
        max_num_seqs: requests of a forward.
        max_model_len: tokens of a request.
    """
    widths = sorted({min(1 << power, resources.max_rows) - 1 for power in range(7)})
    for width in widths:
        for params in KINDS:
            for kind in range(resources.kind + 1):
                for has_probs in (False, True) if resources.records_probs else (False,):
                    draft = _draft(width, PlanKind(kind), vocab_size, ctx, has_probs=has_probs)
                    request = _request(ctx, params, 2, width)
                    if width > 0:
                        request.draft, request.max_drafts = draft, width
                    _launch(ctx, resources, vocab_size, [request, _request(ctx, params, 2, 0)])
    _launch(ctx, resources, vocab_size, [_request(ctx, KINDS[0], 2, 0)])  # of one row
    _draw_drafts(ctx, vocab_size)
    if ctx.runner.buffers(1, 1, 1) is None:
        _launch_loads(ctx, resources, vocab_size, max_num_seqs, max_rows)
    length = min(max_model_len, max_rows)
    lengths = [length] * (max_rows // length) + [max_rows % length]
    prompts = [_request(ctx, KINDS[0], own, 0) for own in lengths[:max_num_seqs] if own > 0]
    # Some batches run eagerly, whatever the largest tier is.
    _launch(ctx, resources, vocab_size, [], prompts, is_eager=True)
    if resources.kind > PlanKind.CHAIN and resources.max_rows > 2:  # beside one, a tree
        request = _request(ctx, KINDS[0], 2, 2)
        request.draft = Draft([0, 0], [0, 0])
        request.max_drafts = 2
        _launch(ctx, resources, vocab_size, [request], prompts[:-1], is_eager=True)
    width, device = max(resources.max_rows - 1, 1), ctx.caches[0].k.device
    survival = torch.rand(max_num_seqs, width, device=device)
    count = torch.ones(max_num_seqs, dtype=torch.int64, device=device)
    admit(survival, torch.ones_like(survival).long(), count, count[0])


def _draw_drafts(ctx: RoundContext, vocab_size: int) -> None:
    """Draw from logits in fp32, which a drafter's may be whatever the target's are."""
    device = ctx.caches[0].k.device
    for params in KINDS[1:]:
        rows = sampling_rows([_request(ctx, params, 2, 0)] * 2, vocab_size, device)
        logits = torch.zeros(2, vocab_size, device=device)
        draw_drafts(logits, rows, 0, torch.ones(2, dtype=torch.bool, device=device))


def _launch_loads(
    ctx: RoundContext, resources: Resources, vocab_size: int, max_num_seqs: int, max_rows: int
) -> None:
    """Launch rounds of few and many requests: without graphs attention depends on that, too."""
    width = resources.max_rows - 1
    for count in row_tiers(min(max_num_seqs, max_rows)):
        most = 0 if width == 0 else min((max_rows - count) // width, count)
        for kind in range(resources.kind + 1):
            for drafting in {min(1, most), most}:
                requests = [_request(ctx, KINDS[0], 2, width) for _ in range(count)]
                for request in requests[count - drafting :]:
                    request.draft = _draft(width, PlanKind(kind), vocab_size, ctx, has_probs=False)
                    request.max_drafts = width
                _launch(ctx, resources, vocab_size, requests)


def _request(
    ctx: RoundContext, params: SamplingParams, num_tokens: int, num_drafts: int
) -> Request:
    """Return a request whose keys and values all lie in the scratch page."""
    request = Request(
        request_id=-1,
        prompt_token_ids=[0] * num_tokens,
        params=params,
        seed=0,
        stop_token_ids=frozenset([0]),
        max_len=num_tokens + 1,
        text=TextStream(None, [0] * num_tokens, ()),
        shares_noise=False,
    )
    cache = ctx.caches[0]
    scratch = cache.scratch_slot // cache.page_size
    request.pages = array("i", [scratch]) * -(-(num_tokens + num_drafts) // cache.page_size)
    return request


def _draft(
    width: int, kind: PlanKind, vocab_size: int, ctx: RoundContext, *, has_probs: bool
) -> Draft:
    """Return a draft that needs this kind of attention, where it is wide enough."""
    probs = None
    if has_probs:
        probs = torch.ones(width, vocab_size, device=ctx.caches[0].k.device) / vocab_size
    if kind is PlanKind.CHAIN:
        return Draft([0] * width, probs=probs)
    if kind is PlanKind.TREE:
        return Draft([0] * width, [max(row - 1, 0) for row in range(width)], probs=probs)
    size = width + 1
    sees = [[column <= row for column in range(size)] for row in range(size)]
    return Draft([0] * width, [-1] * width, positions=[1] * width, visibility=sees)


def _launch(
    ctx: RoundContext,
    resources: Resources,
    vocab_size: int,
    requests: list[Request],
    prompts: Sequence[Request] = (),
    *,
    is_eager: bool = False,
) -> None:
    """Do on the device what a round does."""
    cache = ctx.caches[0]
    device = cache.k.device
    for request in requests:
        request.kv_len = len(request.tokens) - 1
    plan = build_plan(
        requests,
        [request.num_planned for request in requests],
        resources=replace(resources, kind=PlanKind.MASK),
        vocab_size=vocab_size,
        device=device,
    )
    chunks = [Segment(prompt, len(prompt.tokens)) for prompt in prompts]
    step = pack(
        plan,
        requests,
        chunks,
        page_size=cache.page_size,
        scratch_slot=cache.scratch_slot,
        device=device,
        lend=None if is_eager else ctx.runner.buffers,
    )
    output = ctx.runner.run(step.batch)
    if requests:
        roots = sampling_rows(requests, vocab_size, device)
        result = accept(plan, output.logits, roots, step.rows)
        sum_up(plan, result, None)
        move_accepted(ctx, step, replace(result, num_emitted=torch.ones_like(result.num_emitted)))
