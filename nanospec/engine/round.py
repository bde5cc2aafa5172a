"""The speculative round. Start reading here.

Seven steps, each a call into one file: plan what to verify, pack it, run the target, accept,
commit, observe, propose. Ordinary decoding is the speculator that proposes nothing; a chunk of a
prompt is a run of rows that are all accepted.

Host synchronisations per round, in order: `admit` reads how many drafts of each request are
verified, where survivals live on a GPU; `plan` reads each draft whose tokens live there; `pack` reads the row counts where they live there alone; copies of small lists to the device (rows,
page tables, sampling parameters) wait for the work before them; `_read` reads accepted paths and
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec.attention.kv_cache import PagedKVCache
from nanospec.cudagraph.runner import ModelRunner, TargetOutput
from nanospec.engine.packing import PackedStep, pack
from nanospec.engine.scheduler import Scheduler
from nanospec.errors import PlanError
from nanospec.spec.accept import accept
from nanospec.spec.plan import check_plan, first_path
from nanospec.spec.speculator import Speculator
from nanospec.types import (
    AcceptResult,
    Budget,
    CommittedRows,
    FinishReason,
    PlanKind,
    Request,
    Segment,
    StepOutput,
    VerifyPlan,
)


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What stays the same from round to round."""

    speculator: Speculator
    runner: ModelRunner
    scheduler: Scheduler
    cache: PagedKVCache  # of the target
    move_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    scratch_slot: int
    observers: Sequence[Callable[[StepOutput], None]] = ()  # see every round, change nothing


def speculative_round(ctx: RoundContext, segments: Sequence[Segment]) -> StepOutput:
    """Advance every request by its chunk, or by 1 to 1 + `max_draft_len` tokens.

    Returns:
        What was done. Its requests got tokens; those that ended are marked and hold no pages.

    Raises:
        PlanError: the speculator's plan is malformed; nothing was changed.
    """
    requests = [segment.request for segment in segments if segment.samples]
    requests.sort(key=_needs_mask)  # so that the others stay on the causal kernel
    chunks = _chunks(segments)
    num_other_rows = sum(segment.num_rows for segment in segments)
    predicted_us = ctx.speculator.admit(requests, num_other_rows)  # how much of what was drafted
    plan = ctx.speculator.plan(requests)  # what to verify
    _check(plan, requests, ctx.speculator)
    step = pack(  # where it goes
        plan,
        requests,
        chunks,
        page_size=ctx.cache.page_size,
        scratch_slot=ctx.scratch_slot,
        device=ctx.cache.k.device,
    )
    output = ctx.runner.run(step.batch)  # target forward
    result = ctx.speculator.accept(plan, output, requests, step.rows)  # what survives
    if result is None:
        result = accept(plan, output.logits, requests, step.rows)
    done = _commit(ctx, requests, chunks, step, result, plan, output, predicted_us)  # make it last
    try:
        if ctx.speculator.estimator is not None:
            ctx.speculator.estimator.observe(done)
        ctx.speculator.observe_step(done)  # learn
        for observe in ctx.observers:
            observe(done)
    finally:  # whatever an observer does, who has ended holds no pages
        for request, reason in zip(requests, done.reasons, strict=True):
            if reason is not None:
                ctx.scheduler.finish(request, reason)
    _propose(ctx, requests)  # guess again
    return done


def _needs_mask(request: Request) -> bool:
    return request.draft is not None and request.draft.parents is not None


def _chunks(segments: Sequence[Segment]) -> list[Segment]:
    """Return the rows before the roots: prompts, and what a preemption made a prompt again."""
    chunks = []
    for segment in segments:
        num_rows = segment.num_rows - segment.samples
        if num_rows > 0:
            chunks.append(Segment(segment.request, num_rows))
    return chunks


def _check(plan: VerifyPlan, requests: Sequence[Request], speculator: Speculator) -> None:
    """Refuse a plan that goes beyond what was agreed on; read one of a speculator's own back."""
    effective = speculator.effective
    if plan.num_reqs != len(requests):
        raise PlanError(f"the plan has {plan.num_reqs} requests, the round {len(requests)}")
    if plan.kind > effective.kind or plan.max_rows > effective.max_rows:
        raise PlanError(
            f"the plan is a {plan.kind.name.lower()} of up to {plan.max_rows} rows, and "
            f"{effective.kind.name.lower()}s of {effective.max_rows} rows were agreed on"
        )
    if type(speculator).plan is not Speculator.plan:
        check_plan(plan, requests, effective, speculator.setup.model.vocab_size)


def _commit(
    ctx: RoundContext,
    requests: list[Request],
    chunks: Sequence[Segment],
    step: PackedStep,
    result: AcceptResult,
    plan: VerifyPlan,
    output: TargetOutput,
    predicted_us: float | None,
) -> StepOutput:
    """Make the accepted paths part of their requests: cache, tokens, text, counters, pages."""
    if plan.kind > PlanKind.CHAIN:  # the rows of a chain are where they belong
        _move_accepted(ctx, step, result)
    tokens, path, parents = _read(result, plan)
    committed = []
    for chunk in chunks:
        start = chunk.request.kv_len
        ctx.scheduler.commit(chunk.request, chunk.num_rows)
        committed.append(CommittedRows(chunk.request, start, chunk.request.kv_len))
    emitted = []
    reasons: list[FinishReason | None] = []
    for request, own, rows, above, count in zip(
        requests, tokens, path, parents, step.counts, strict=True
    ):
        start = request.kv_len
        is_round = request.num_output > 0  # the end of a prompt is no round
        kept, reason = _append(request, own)
        if is_round:
            request.stats.count_round(
                verified=count - 1,
                depth=_depth(above[:count]),
                accepted=len(rows) - 1,
                emitted=len(kept),
            )
        ctx.scheduler.commit(request, len(kept))
        committed.append(CommittedRows(request, start, request.kv_len))
        emitted.append(kept)
        reasons.append(reason)
    done = StepOutput(
        requests=requests,
        drafts=[request.draft for request in requests],
        plan=plan,
        counts=step.counts,
        emitted=emitted,
        reasons=reasons,
        path=path,
        committed=committed,
        features=_committed_features(output.features, step, path, emitted),
        logits=output.logits,
        rows=step.rows,
        num_tokens=step.batch.num_tokens,
        tier=output.tier,
        predicted_us=predicted_us,
    )
    for request in requests:
        request.draft = None
        request.max_drafts = 0
    return done


def _move_accepted(ctx: RoundContext, step: PackedStep, result: AcceptResult) -> None:
    """Move the keys and values of accepted rows to where a chain would have put them."""
    starts = step.rows.offsets[:-1, None]
    last = len(step.rows.slots) - 1
    row = torch.arange(result.path.shape[1], device=result.path.device)
    src = step.rows.slots[(starts + result.path).clamp(max=last)]
    dst = step.rows.slots[(starts + row).clamp(max=last)]
    for cache in (ctx.cache.k, ctx.cache.v):
        ctx.move_kv(cache, src, dst, result.num_emitted)


def _read(
    result: AcceptResult, plan: VerifyPlan
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Read emitted tokens, path and parents of each request; the one wait for the GPU's work."""
    width = plan.max_rows
    columns = (result.tokens, result.path, plan.parents, result.num_emitted[:, None])
    read = torch.cat(columns, dim=1).tolist()
    tokens = [row[: row[-1]] for row in read]
    path = [row[width : width + row[-1]] for row in read]
    return tokens, path, [row[2 * width : 3 * width] for row in read]


def _append(request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Append tokens up to the one that ends the request; ids, text and counters end there.

    Returns:
        The tokens kept, and why the last one is the last, if it is.
    """
    kept: list[int] = []
    reason: FinishReason | None = None
    for token in tokens:
        request.tokens.append(token)
        kept.append(token)
        reason = _reason_to_end(request, token)
        if reason is not None:
            break
    request.stats.tokens += len(kept)
    return kept, reason


def _reason_to_end(request: Request, token: int) -> FinishReason | None:
    """Say why a token just appended is the last one; a stop at the very end is still a stop."""
    may_stop = request.num_output > request.params.min_tokens
    if token in request.stop_token_ids:
        return "stop"
    if request.text.push(token, may_stop=may_stop):
        return "stop"
    return "length" if len(request.tokens) >= request.max_len else None


def _depth(parents: Sequence[int]) -> int:
    """Return how deep a tree of rows is, given each row's parent; rows of nobody are not in it."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 and depths[parent] >= 0 else -1)
    return max(depths)


def _committed_features(
    features: Sequence[Tensor],
    step: PackedStep,
    path: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Pick the committed rows out of each tap's rows: the chunks', then each accepted path's."""
    if not features:
        return []
    rows = list(range(step.first_row))
    start = step.first_row
    for own, kept, count in zip(path, emitted, step.counts, strict=True):
        rows += [start + row for row in own[: len(kept)]]
        start += count
    index = torch.tensor(rows).to(features[0].device)
    return [feature[index] for feature in features]


def _propose(ctx: RoundContext, requests: Sequence[Request]) -> None:
    """Reserve pages for the next drafts, and have them guessed."""
    effective = ctx.speculator.effective
    budget = ctx.speculator.candidate_budget(ctx.scheduler.view())
    most = min(budget.max_rows_per_request, effective.max_rows)
    going = ctx.scheduler.reserve_drafts(requests, Budget(budget.total_drafts, most))
    if not going:
        return
    drafts = list(ctx.speculator.propose(going))
    for request, draft in zip(going, drafts, strict=True):
        request.stats.drafted += 0 if draft is None else len(draft)
    if effective.kind is PlanKind.CHAIN:
        drafts = [None if draft is None else first_path(draft) for draft in drafts]
    if ctx.speculator.estimator is not None:
        drafts = ctx.speculator.estimator.complete(going, drafts)
    for request, draft in zip(going, drafts, strict=True):
        request.draft = draft
