"""From the drafts of requests to a checked `VerifyPlan`. Runs on the host; knows no pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanospec.device import to_device, to_device_together
from nanospec.errors import PlanError
from nanospec.types import (
    Draft,
    DraftRows,
    PlanKind,
    Request,
    Resources,
    VerifyPlan,
    as_list,
)

NOBODY = -1  # parent of the root, and of rows that are computed but never accepted


@dataclass(slots=True)
class _Rows:
    """The rows of one request on the host, root included."""

    tokens: list[int]
    parents: list[int]
    positions: list[int]  # counted from the root's
    visible: list[set[int]]  # rows each row sees, itself included

    @property
    def kind(self) -> PlanKind:
        """The least kind of attention these rows need."""
        return _kind(self.parents)


def build_plan(
    requests: Sequence[Request],
    counts: Sequence[int],
    *,
    resources: Resources,
    vocab_size: int,
    device: torch.device,
) -> VerifyPlan:
    """Lay out the first `counts[r]` drafts of each request behind its root.

    Drafts are in an order in which parents come first, so any leading part is a closed tree. Those
    that are rows of one `DraftRows` stay on the device and are not read back.

    Args:
        requests: R, each with its root pending and, where its count is not 0, a draft.
        counts: draft rows to verify of each.
        resources: what the plan may not exceed.
        vocab_size: V.
        device: where the plan goes.

    Raises:
        PlanError: a draft is malformed or exceeds the resources; request and row are named.
    """
    if not any(counts):
        return _plan_of_roots(requests, device)
    origin = common_origin(requests)
    if origin is not None:
        return _plan_of_rows(requests, counts, origin, resources, device)
    rows = [
        _rows(request, request.draft if count else None, count, vocab_size)
        for request, count in zip(requests, counts, strict=True)
    ]
    kinds = [each.kind for each in rows]
    kind = max(kinds, default=PlanKind.CHAIN)
    num_causal = next((i for i, own in enumerate(kinds) if own > PlanKind.CHAIN), len(kinds))
    for request, each in zip(requests, rows, strict=True):
        _check_resources(request, each, resources)
    lengths = [len(each.tokens) for each in rows]
    max_rows = max(lengths, default=1)
    is_mask = kind is PlanKind.MASK
    probs, is_sampled = _probs(requests, counts, max_rows - 1, vocab_size, device)
    padded = [
        _padded(column, max_rows)
        for column in (
            [each.tokens for each in rows],
            [each.parents for each in rows],
            [each.positions for each in rows],
        )
    ]
    tokens, parents, positions, num_rows = to_device_together(
        [*((column, torch.int64) for column in padded), (lengths, torch.int64)], device
    )
    return VerifyPlan(
        kind=kind,
        tokens=tokens.view(-1, max_rows),  # [0, M] without requests
        parents=parents.view(-1, max_rows),
        num_rows=num_rows,
        num_tokens=sum(lengths),
        row_counts=lengths,
        num_masked=len(kinds) - num_causal,
        probs=probs,
        is_sampled=is_sampled,
        positions=positions if is_mask else None,
        visibility=_visibility(rows, max_rows).to(device) if is_mask else None,
    )


def _plan_of_roots(requests: Sequence[Request], device: torch.device) -> VerifyPlan:
    """Lay out requests without drafts; see `build_plan`."""
    count = len(requests)
    roots = [request.tokens[-1] for request in requests]
    tokens, parents, num_rows = to_device_together(
        [(each, torch.int64) for each in (roots, [NOBODY] * count, [1] * count)], device
    )
    return VerifyPlan(
        kind=PlanKind.CHAIN,
        tokens=tokens[:, None],
        parents=parents[:, None],
        num_rows=num_rows,
        num_tokens=count,
        row_counts=[1] * count,
        num_masked=0,
    )


def common_origin(requests: Sequence[Request]) -> DraftRows | None:
    """Return what all drafts that may be verified are rows of, if they are."""
    found = [r.draft.origin for r in requests if r.draft is not None and r.max_drafts > 0]
    return found[0] if len(set(map(id, found))) == 1 else None


def rows_in(origin: DraftRows, requests: Sequence[Request]) -> Tensor | None:
    """Return each request's row of a `common_origin`, [R] int64; None where they are all, in order.

    Of a request that has no draft it is any.
    """
    rows = [r.draft.row if r.draft is not None and r.max_drafts > 0 else 0 for r in requests]
    is_whole = rows == list(range(len(origin.tokens)))
    return None if is_whole else to_device(rows, origin.tokens.device)


def _plan_of_rows(
    requests: Sequence[Request],
    counts: Sequence[int],
    origin: DraftRows,
    resources: Resources,
    device: torch.device,
) -> VerifyPlan:
    """Lay out chains that were drafted together; see `build_plan`."""
    for request, count in zip(requests, counts, strict=True):
        if count > 0:
            assert request.draft is not None, "only drafts are counted"
            _check_count(request, request.draft, count)
            if 1 + count > resources.max_rows:
                raise _too_many_rows(request, 1 + count, resources)
    width = max(counts)
    index = rows_in(origin, requests)

    def wanted(values: Tensor) -> Tensor:
        return values[:, :width] if index is None else values[index, :width]

    is_sampled = [
        count > 0 and not request.shares_noise
        for request, count in zip(requests, counts, strict=True)
    ]
    has_probs = origin.probs is not None and any(is_sampled)
    lengths = [1 + count for count in counts]
    roots, parents, num_rows, sampled = to_device_together(
        [
            ([request.tokens[-1] for request in requests], torch.int64),
            (np.tile(np.arange(NOBODY, width), (len(requests), 1)), torch.int64),
            (lengths, torch.int64),
            (is_sampled, torch.bool),
        ],
        device,
    )
    return VerifyPlan(
        kind=PlanKind.CHAIN,
        tokens=torch.cat((roots[:, None], wanted(origin.tokens)), dim=1),
        parents=parents,
        num_rows=num_rows,
        num_tokens=sum(lengths),
        row_counts=lengths,
        num_masked=0,
        probs=wanted(origin.probs) if has_probs and origin.probs is not None else None,
        is_sampled=sampled if has_probs else None,
    )


def check_plan(
    plan: VerifyPlan, requests: Sequence[Request], resources: Resources, vocab_size: int
) -> None:
    """Read back a plan that `build_plan` did not make, and refuse it if it is malformed.

    Synchronises, which only speculators with a `plan` of their own pay for.

    Raises:
        PlanError: a row is malformed, or its request's rows exceed the resources or the pages.
    """
    parents, tokens = plan.parents.tolist(), plan.tokens.tolist()
    positions = None if plan.positions is None else plan.positions.tolist()
    visibility = None if plan.visibility is None else plan.visibility.tolist()
    causal = len(requests) - plan.num_masked
    for index, (request, count) in enumerate(zip(requests, plan.num_rows.tolist(), strict=True)):
        if not 1 <= count <= plan.max_rows:
            raise _error(request, 0, f"{count} rows in a plan of {plan.max_rows}")
        if count > 1 + request.max_drafts:
            raise _error(request, count - 1, f"there are pages for {request.max_drafts} drafts")
        if tokens[index][0] != request.tokens[-1] or parents[index][0] != NOBODY:
            raise _error(request, 0, "row 0 is the root, the last committed token")
        draft = Draft(
            tokens[index][1:count],
            parents[index][1:count],
            positions=None if positions is None else positions[index][1:count],
            visibility=None
            if visibility is None
            else [row[:count] for row in visibility[index][:count]],
        )
        own = _rows(request, draft, count - 1, vocab_size).kind
        if own > min(plan.kind, resources.kind) or (own > PlanKind.CHAIN and index < causal):
            raise _error(request, 0, f"it is a {own.name.lower()}, and less was declared")
        if own is PlanKind.MASK and (positions is None or visibility is None):
            raise _error(request, 0, "rows of nobody need positions and visibility")


def _kind(parents: Sequence[int]) -> PlanKind:
    """Return the least kind of attention that rows with these parents need."""
    if NOBODY in parents[1:]:
        return PlanKind.MASK
    is_chain = list(parents[1:]) == list(range(len(parents) - 1))
    return PlanKind.CHAIN if is_chain else PlanKind.TREE


def first_path(draft: Draft) -> Draft:
    """Return the path of first children of a tree, as a chain; for attention without masks."""
    parents = draft.parents
    if parents is None:
        return draft
    tokens: list[int] = as_list(draft.tokens)
    survival: list[float] = [] if draft.survival is None else as_list(draft.survival)
    path: list[int] = []
    for row, parent in enumerate(parents, start=1):
        if parent == (path[-1] if path else 0):
            path.append(row)
    kept = [row - 1 for row in path]
    return Draft(
        tokens=[tokens[index] for index in kept],
        probs=None if draft.probs is None else draft.probs[kept],
        survival=[survival[index] for index in kept] if survival else None,
    )


def _rows(request: Request, draft: Draft | None, count: int, vocab_size: int) -> _Rows:
    """Return the checked root and first `count` drafts of a request."""
    rows = _Rows([request.tokens[-1]], [NOBODY], [0], [{0}])
    if draft is None:
        return rows
    _check_shapes(request, draft, count, vocab_size)
    parents = range(count) if draft.parents is None else draft.parents
    from_root = [True]
    for row, (token, parent) in enumerate(
        zip(as_list(draft.tokens)[:count], parents, strict=False), start=1
    ):
        if not 0 <= token < vocab_size:
            raise _error(request, row, f"token {token} is not in the vocabulary of {vocab_size}")
        if not NOBODY <= parent < row:
            raise _error(request, row, f"its parent is row {parent}; parents come before children")
        is_draft = parent != NOBODY and from_root[parent]
        from_root.append(is_draft)
        default = (
            (rows.positions[parent] + 1, rows.visible[parent] | {row}) if is_draft else (0, {row})
        )
        position, visible = _given(draft, row, default)
        if is_draft and (position, visible) != default:
            raise _error(
                request,
                row,
                "a row that may be accepted stands at its depth and sees its ancestors; "
                f"give it parent {NOBODY} if it is only to be computed",
            )
        rows.tokens.append(token)
        rows.parents.append(parent if is_draft else NOBODY)
        rows.positions.append(position)
        rows.visible.append(visible)
    return rows


def _given(draft: Draft, row: int, default: tuple[int, set[int]]) -> tuple[int, set[int]]:
    """Return position and visible rows as the draft states them, or else the default."""
    position, visible = default
    if draft.positions is not None:
        position = draft.positions[row - 1]
    if draft.visibility is not None:
        visible = {column for column in range(row) if draft.visibility[row][column]} | {row}
    return position, visible


def _check_count(request: Request, draft: Draft, count: int) -> None:
    size = len(draft)
    if count > size:
        raise _error(request, size + 1, f"{count} draft rows are planned, the draft has {size}")


def _check_shapes(request: Request, draft: Draft, count: int, vocab_size: int) -> None:
    size = len(draft)
    _check_count(request, draft, count)
    for name, wanted in (("parents", size), ("survival", size), ("positions", size)):
        value = getattr(draft, name)
        if value is not None and len(value) != wanted:
            raise _error(request, 0, f"{name} has {len(value)} entries for {wanted} tokens")
    if draft.probs is not None and tuple(draft.probs.shape) != (size, vocab_size):
        raise _error(
            request, 0, f"probs has shape {tuple(draft.probs.shape)}, not {(size, vocab_size)}"
        )
    if draft.probs is not None and draft.probs.dtype != torch.float32:
        raise _error(request, 0, f"probs is {draft.probs.dtype}; drafts are judged in float32")
    if draft.visibility is not None:
        widths = {len(row) for row in draft.visibility}
        if len(draft.visibility) != size + 1 or widths != {size + 1}:
            raise _error(request, 0, f"visibility is not [{size + 1}, {size + 1}]")
    if draft.positions is not None and min(draft.positions, default=0) < 0:
        raise _error(request, 0, "a position before the root's; positions count from the root")


def _check_resources(request: Request, rows: _Rows, resources: Resources) -> None:
    size = len(rows.tokens)
    if size > resources.max_rows:
        raise _too_many_rows(request, size, resources)
    if rows.kind > resources.kind:
        wanted, declared = rows.kind.name.lower(), resources.kind.name.lower()
        raise _error(request, 0, f"it is a {wanted}, and only a {declared} was declared")


def _too_many_rows(request: Request, size: int, resources: Resources) -> PlanError:
    declared = resources.max_rows
    return _error(request, declared, f"{size} rows, and only {declared} were declared")


def _error(request: Request, row: int, what: str) -> PlanError:
    return PlanError(f"malformed plan: request {request.request_id}, row {row}: {what}")


def _padded(rows: list[list[int]], width: int) -> list[list[int]]:
    """Return rows of one width, padded with 0."""
    return [row + [0] * (width - len(row)) for row in rows]


def _visibility(rows: list[_Rows], max_rows: int) -> Tensor:
    """Return [R, M, M] bool on the host."""
    visibility = torch.zeros(len(rows), max_rows, max_rows, dtype=torch.bool)
    for index, each in enumerate(rows):
        for row, seen in enumerate(each.visible):
            visibility[index, row, list(seen)] = True
    return visibility


def _probs(
    requests: Sequence[Request],
    counts: Sequence[int],
    width: int,
    vocab_size: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Return q [R, width, V] and who has one [R], or None and None if nobody has."""
    found = [
        (index, request.draft.probs[:count])
        for index, (request, count) in enumerate(zip(requests, counts, strict=True))
        if count
        and request.draft is not None
        and request.draft.probs is not None
        and not request.shares_noise
    ]
    if not found:
        return None, None
    probs = torch.zeros(len(requests), width, vocab_size, device=device)
    is_sampled = torch.zeros(len(requests), dtype=torch.bool)
    for index, q in found:
        probs[index, : len(q)] = q
        is_sampled[index] = True
    return probs, is_sampled.to(device)
