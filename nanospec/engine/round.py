"""The speculative round. Start reading here.

Seven steps, each a call into one file: plan what to verify, pack it, run the target, accept,
commit, observe, propose. Ordinary decoding is the speculator that proposes nothing; a chunk of a
prompt is a run of rows that are all accepted.

A round has two halves. `launch` gives the device its work, `settle` reads what came of it. Where
drafts are made on the device and nothing of them must be read (`Speculator.runs_ahead`), the next
round is launched before this one is settled: the device never waits for the host. What the host
learns a round late, a stop say, ends nothing but its own request; what that did meanwhile is
dropped.

Host synchronisations per round, in order: `admit` reads how many drafts are above a threshold,
where survivals live on a GPU, and under `adaptive=auto` the survivals of the round before, which
came with its drafts; `plan` reads drafts whose tokens live there, but for those of `DraftRows`, and
a plan of a speculator's own; attention that plans on the host reads lengths the host does not know,
and waits for its last plan to be copied; `settle` reads accepted paths and tokens; drafters that do
not run ahead copy small lists and read what they drew, as do estimators of acceptance. On the
default path there is only `settle`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanospec.attention.kv_cache import PagedKVCache
from nanospec.cudagraph.runner import ModelRunner, TargetOutput
from nanospec.device import to_device
from nanospec.engine.answer import Answer, sum_up
from nanospec.engine.packing import PackedStep, pack
from nanospec.engine.scheduler import Scheduler
from nanospec.errors import PlanError
from nanospec.params import SamplingRows
from nanospec.spec.accept import accept
from nanospec.spec.plan import check_plan, first_path
from nanospec.spec.sampler import sampling_rows
from nanospec.spec.speculator import Speculator
from nanospec.types import (
    AcceptResult,
    CommittedRows,
    Draft,
    DraftRow,
    DraftRows,
    FinishReason,
    Pending,
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
    caches: Sequence[PagedKVCache]  # of the target, and of a drafter in the same pages
    move_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    runs_ahead: bool = False  # whether a round is launched before the one before is settled
    observers: Sequence[Callable[[StepOutput], None]] = ()  # see every round, change nothing


@dataclass(frozen=True, slots=True)
class Flight:
    """A round that was launched and is not settled yet."""

    requests: list[Request]  # [R], those that sample
    drafts: list[Draft | None]  # [R], of which the plan verifies a part
    chunks: list[CommittedRows]
    plan: VerifyPlan
    step: PackedStep
    pending: Pending  # what the round, and the one in flight before it, give the requests
    num_new: Tensor  # [R] int64, tokens that the round alone gives
    output: TargetOutput
    answer: Answer
    predicted_us: float | None


def speculative_round(ctx: RoundContext, segments: Sequence[Segment]) -> StepOutput:
    """Advance every request by its chunk, or by 1 to 1 + `max_draft_len` tokens.

    Returns:
        What was done. Its requests got tokens; those that ended are marked and hold no pages.

    Raises:
        PlanError: the speculator's plan is malformed; nothing was changed.
    """
    return settle(ctx, launch(ctx, segments))


def launch(ctx: RoundContext, segments: Sequence[Segment], before: Flight | None = None) -> Flight:
    """Give the device a round's work.

    Args:
        ctx: what stays the same.
        segments: from the scheduler.
        before: the round in flight, if there is one.

    Raises:
        PlanError: the speculator's plan is malformed; nothing was changed.
    """
    requests = [segment.request for segment in segments if segment.samples]
    if ctx.speculator.effective.kind > PlanKind.CHAIN:
        requests.sort(key=_needs_mask)  # so that the others stay on the causal kernel
    chunks = _chunks(segments)
    cache = ctx.caches[0]
    device = cache.k.device
    ahead: Tensor | None = None
    num_other_rows = sum(segment.num_rows for segment in segments)
    room = max(ctx.scheduler.max_num_batched_tokens - num_other_rows, 0)
    verdict = ctx.speculator.admit(requests, num_other_rows, room)  # how much of what was drafted
    plan = ctx.speculator.plan(requests)  # what to verify
    _check(plan, requests, ctx.speculator)
    if before is not None:
        plan.tokens[:, 0], ahead = pending_of(before, requests)
    most_rows = plan.row_counts or [1 + request.num_planned for request in requests]
    if verdict.counts is not None:
        plan = replace(
            plan,
            num_rows=1 + verdict.counts,
            num_tokens=len(requests) + verdict.total,
            row_counts=None,
        )
    step = pack(  # where it goes
        plan,
        requests,
        chunks,
        page_size=cache.page_size,
        scratch_slot=cache.scratch_slot,
        device=device,
        ahead=ahead,
        lend=ctx.runner.buffers,
    )
    output = ctx.runner.run(step.batch)  # target forward
    roots = None if before is None else _sampling_of(before, requests)
    if roots is None:
        roots = sampling_rows(requests, output.logits.shape[-1], device, ahead)
    result = ctx.speculator.accept(plan, output, roots, step.rows)  # what survives
    if result is None:
        result = accept(plan, output.logits, roots, step.rows)
    if plan.kind > PlanKind.CHAIN:  # the rows of a chain are where they belong
        move_accepted(ctx, step, result)
    next_roots, num_tokens, values = sum_up(plan, result, ahead)
    drafts = [request.draft for request in requests]
    flight = Flight(
        requests=requests,
        drafts=_lasting(drafts) if ctx.runs_ahead else drafts,
        chunks=_commit_chunks(ctx, chunks),
        plan=plan,
        step=step,
        pending=Pending(next_roots, num_tokens, roots.later(result.num_emitted)),
        num_new=result.num_emitted,
        output=output,
        answer=Answer(plan, values),
        predicted_us=verdict.predicted_us,
    )
    for request, count in zip(requests, most_rows, strict=True):
        request.draft, request.max_drafts = None, 0
        request.in_flight.append(count)
    return flight


def settle(ctx: RoundContext, flight: Flight) -> StepOutput:
    """Read what came of a round: tokens, text, stops. Waits for its acceptance, for nothing later.

    Requests that ended since it was launched are left as they are.
    """
    done = _commit(ctx, flight)  # make it last
    try:
        if ctx.speculator.estimator is not None:
            ctx.speculator.estimator.observe(done)
        ctx.speculator.observe_step(done)  # learn
        for observe in ctx.observers:
            observe(done)
    finally:  # whatever an observer does, who has ended holds no pages
        for request, reason in zip(done.requests, done.reasons, strict=True):
            if reason is not None:
                ctx.scheduler.finish(request, reason)
    if not ctx.runs_ahead:
        propose(ctx, flight)  # guess again
    return done


def pending_of(flight: Flight, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
    """Return roots, and how many tokens a flight gives these requests, without waiting for it.

    Those of the round before, if it is not settled, are not counted.
    """
    roots, num_new = flight.pending.roots, flight.num_new
    if requests == flight.requests:
        return roots, num_new
    device, places = roots.device, _places(flight.requests, requests)
    place, root = to_device([places, [request.tokens[-1] for request in requests]], device).unbind()
    # Place -1 is one behind the end: no tokens.
    found, ahead = (torch.nn.functional.pad(each, (0, 1))[place] for each in (roots, num_new))
    return torch.where(place >= 0, found, root), ahead


def _sampling_of(flight: Flight, requests: Sequence[Request]) -> SamplingRows | None:
    """Return how a flight says that its requests are sampled next; None for others than those.

    Also None where some could not stop: if they can by now, that costs no more passes over logits.
    """
    sampling = flight.pending.sampling
    return sampling if requests == flight.requests and len(sampling.stops) == 0 else None


def _places(requests: Sequence[Request], wanted: Sequence[Request]) -> list[int]:
    """Return where each of those that are wanted is among requests, -1 where it is not."""
    place_of = {request: place for place, request in enumerate(requests)}
    return [place_of.get(request, -1) for request in wanted]


def _lasting(drafts: Sequence[Draft | None]) -> list[Draft | None]:
    """Return drafts as observers may see them where rounds run ahead: their q is overwritten."""
    known: dict[DraftRows, DraftRows] = {}
    found: list[Draft | None] = []
    for draft in drafts:
        if isinstance(draft, DraftRow):
            if draft.origin.probs is not None:
                if draft.origin not in known:
                    known[draft.origin] = replace(draft.origin, probs=None)
                draft = DraftRow(known[draft.origin], draft.row, len(draft))
        elif draft is not None and draft.probs is not None:
            draft = draft.but(probs=None, origin=None)
        found.append(draft)
    return found


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


def move_accepted(ctx: RoundContext, step: PackedStep, result: AcceptResult) -> None:
    """Move the keys and values of accepted rows to where a chain would have put them."""
    starts = step.rows.offsets[:-1, None]
    last = len(step.rows.slots) - 1
    row = torch.arange(result.path.shape[1], device=result.path.device)
    src = step.rows.slots[(starts + result.path).clamp(max=last)]
    dst = step.rows.slots[(starts + row).clamp(max=last)]
    for cache in ctx.caches:
        for part in (cache.k, cache.v):
            ctx.move_kv(part, src, dst, result.num_emitted)


def _commit_chunks(ctx: RoundContext, chunks: Sequence[Segment]) -> list[CommittedRows]:
    """Count the chunks as cached: whoever reads them comes later on the device too."""
    committed = []
    for chunk in chunks:
        start = chunk.request.kv_len
        ctx.scheduler.commit(chunk.request, chunk.num_rows)
        committed.append(CommittedRows(chunk.request, start, chunk.request.kv_len))
    return committed


def _commit(ctx: RoundContext, flight: Flight) -> StepOutput:
    """Make the accepted paths part of their requests: tokens, text, counters, pages."""
    outcome = flight.answer.read()
    starts = [request.kv_len for request in flight.requests]
    emitted: list[list[int]] = []
    reasons: list[FinishReason | None] = []
    for request, draft, tokens, count, depth in zip(
        flight.requests, flight.drafts, outcome.tokens, outcome.counts, outcome.depths, strict=True
    ):
        if request.is_finished:  # by the round before, or aborted since
            emitted.append([])
            reasons.append(None)
            continue
        request.in_flight.pop(0)
        stats = request.stats
        if draft is not None:
            stats.drafted += len(draft)
        is_round = request.num_output > 0  # the end of a prompt is no round
        kept, reason = _append(request, tokens)
        stats.tokens += len(kept)
        if is_round:
            stats.count_round(
                verified=count - 1, depth=depth, accepted=len(tokens) - 1, emitted=len(kept)
            )
        ctx.scheduler.commit(request, len(kept))
        emitted.append(kept)
        reasons.append(reason)
    return StepOutput(
        requests=flight.requests,
        drafts=flight.drafts,
        plan=replace(flight.plan, probs=None) if ctx.runs_ahead else flight.plan,
        counts=outcome.counts,
        emitted=emitted,
        reasons=reasons,
        path=outcome.path,
        starts=starts,
        chunks=flight.chunks,
        logits=None if ctx.runs_ahead else flight.output.logits,
        rows=flight.step.rows,
        num_tokens=flight.step.num_rows,
        tier=flight.output.tier,
        predicted_us=flight.predicted_us,
    )


def _append(request: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """Append tokens up to the one that ends the request; ids and text end there.

    Returns:
        The tokens kept, and why the last one is the last, if it is.
    """
    room = request.max_len - len(request.tokens)
    kept = tokens[:room]
    # A stop at the very end is still a stop. The token that is one by itself is not in the text.
    reason: FinishReason | None = "length" if len(kept) == room else None
    spoken = kept
    if not request.stop_token_ids.isdisjoint(kept):
        stop = next(at for at, token in enumerate(kept) if token in request.stop_token_ids)
        kept, spoken, reason = kept[: stop + 1], kept[:stop], "stop"
    cut = request.text.extend(spoken, request.params.min_tokens - request.num_output)
    if cut is not None:
        kept, reason = kept[: cut + 1], "stop"
    request.tokens += kept
    return kept, reason


def propose(ctx: RoundContext, flight: Flight) -> None:
    """Reserve pages for the next drafts, and have them guessed."""
    speculator, effective = ctx.speculator, ctx.speculator.effective
    if effective.max_rows == 1:
        return
    budget = speculator.candidate_budget(ctx.scheduler.view())
    most = min(budget.max_rows_per_request, effective.max_rows)
    budget = replace(budget, max_rows_per_request=most)
    going = ctx.scheduler.reserve_drafts(flight.requests, budget)
    if not going:
        return
    if ctx.runs_ahead:
        pending = flight.pending
        if len(going) < len(flight.requests):
            places = _places(flight.requests, going)
            pending = pending.at(to_device(places, pending.roots.device))
        drafts = list(speculator.propose_ahead(going, pending))
    else:
        drafts = list(speculator.propose(going))
    if effective.kind is PlanKind.CHAIN:
        drafts = [None if draft is None else first_path(draft) for draft in drafts]
    if speculator.estimator is not None:
        drafts = speculator.estimator.complete(going, drafts)
    for request, draft in zip(going, drafts, strict=True):
        request.draft = draft
