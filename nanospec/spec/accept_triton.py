"""Triton versions of `accept`: one program per request, one launch, no host synchronisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec.params import SamplingRows
from nanospec.spec import noise, noise_triton
from nanospec.types import AcceptResult, VerifyPlan

# Numbers that change from round to round are not specialised on, nor is where a slice of a buffer
# starts: no round waits for a compiler.
_INTEGERS = [
    f"{name}_ptr"
    for name in ("tokens", "parents", "num_rows", "offsets", "targets", "out_tokens", "out_path")
] + ["num_emitted_ptr"]


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=_INTEGERS)
def _follow_kernel(
    tokens_ptr,
    parents_ptr,
    num_rows_ptr,
    offsets_ptr,
    targets_ptr,
    out_tokens_ptr,
    out_path_ptr,
    num_emitted_ptr,
    max_rows,
):
    request = tl.program_id(0)
    base = request * max_rows
    start = tl.load(offsets_ptr + request)
    row = 0
    depth = 0
    target = tl.load(targets_ptr + start)
    for child in range(1, tl.load(num_rows_ptr + request).to(tl.int32)):
        is_child = tl.load(parents_ptr + base + child) == row
        if is_child & (tl.load(tokens_ptr + base + child) == target):
            tl.store(out_tokens_ptr + base + depth, target)
            depth += 1
            tl.store(out_path_ptr + base + depth, child)
            row = child
            target = tl.load(targets_ptr + start + child)
    tl.store(out_tokens_ptr + base + depth, target)
    tl.store(num_emitted_ptr + request, depth + 1)


def follow(plan: VerifyPlan, targets: Tensor, offsets: Tensor) -> AcceptResult:
    """See `accept.follow_reference`."""
    result = _new_result(plan)
    _follow_kernel[(plan.num_reqs,)](
        plan.tokens,
        plan.parents,
        plan.num_rows,
        offsets,
        targets,
        result.tokens,
        result.path,
        result.num_emitted,
        plan.max_rows,
    )
    return result


@triton.jit(
    do_not_specialize=["max_rows", "q_stride"],
    do_not_specialize_on_alignment=[*_INTEGERS, "is_sampled_ptr", "coins_ptr", "keys_ptr"],
)
def _accept_kernel(
    tokens_ptr,
    parents_ptr,
    num_rows_ptr,
    offsets_ptr,
    is_sampled_ptr,
    p_ptr,
    q_ptr,
    targets_ptr,
    coins_ptr,
    keys_ptr,
    work_ptr,
    out_tokens_ptr,
    out_path_ptr,
    num_emitted_ptr,
    max_rows,
    vocab_size,
    q_stride,
    BLOCK: tl.constexpr,
):
    # What is left of p and q at the row reached is kept in scratch memory once a child was
    # rejected, unnormalised, with their masses in registers; until then they are the plan's own.
    request = tl.program_id(0).to(tl.int64)
    base = request * max_rows
    start = tl.load(offsets_ptr + request)
    sampled = tl.load(is_sampled_ptr + request) != 0
    work_p = work_ptr + request * 2 * vocab_size
    work_q = work_p + vocab_size
    lanes = tl.arange(0, BLOCK)

    row = 0
    depth = 0
    target = tl.load(targets_ptr + start)
    p_now = p_ptr + start * vocab_size
    q_now = work_q
    p_mass = 1.0
    q_mass = 1.0
    is_first = True
    for child in range(1, tl.load(num_rows_ptr + request).to(tl.int32)):
        if tl.load(parents_ptr + base + child) == row:
            token = tl.load(tokens_ptr + base + child)
            accepted = token == target
            if sampled:
                if is_first:
                    q_now = q_ptr + request * q_stride + (child - 1) * vocab_size
                    q_mass = 1.0
                    is_first = False
                p_token = tl.load(p_now + token) / p_mass
                q_token = tl.load(q_now + token) / q_mass
                coin = tl.load(coins_ptr + base + child)
                accepted = (q_token > 0) & (coin * q_token < p_token)
            if accepted:
                tl.store(out_tokens_ptr + base + depth, token)
                depth += 1
                tl.store(out_path_ptr + base + depth, child)
                row = child
                target = tl.load(targets_ptr + start + child)
                p_now = p_ptr + (start + child) * vocab_size
                p_mass = 1.0
                is_first = True
            elif sampled:
                left_p = 0.0
                left_q = 0.0
                for at in range(0, vocab_size, BLOCK):
                    column = at + lanes
                    inside = column < vocab_size
                    p = tl.load(p_now + column, mask=inside, other=0.0) / p_mass
                    q = tl.load(q_now + column, mask=inside, other=0.0) / q_mass
                    rest = tl.where(column == token, 0.0, q)
                    left_p += tl.sum(tl.maximum(p - q, 0.0))
                    left_q += tl.sum(rest)
                tl.debug_barrier()
                for at in range(0, vocab_size, BLOCK):
                    column = at + lanes
                    inside = column < vocab_size
                    p = tl.load(p_now + column, mask=inside, other=0.0) / p_mass
                    q = tl.load(q_now + column, mask=inside, other=0.0) / q_mass
                    residual = tl.where(left_p > 0, tl.maximum(p - q, 0.0), p)
                    tl.store(work_p + column, residual, mask=inside)
                    tl.store(work_q + column, tl.where(column == token, 0.0, q), mask=inside)
                # Another thread may read what this one wrote.
                tl.debug_barrier()
                p_now = work_p
                q_now = work_q
                p_mass = tl.where(left_p > 0, left_p, 1.0)
                q_mass = tl.where(left_q > 0, left_q, 1.0)  # q is all zero then
    if sampled:
        key = tl.load(keys_ptr + base + depth).to(tl.uint64, bitcast=True)
        best = -float("inf")
        for at in range(0, vocab_size, BLOCK):
            column = at + lanes
            p = tl.load(p_now + column, mask=column < vocab_size, other=0.0) / p_mass
            log_p = tl.log(tl.where(p > 0, p, 1.0))
            score = tl.where(
                p > 0,
                log_p + noise_triton.gumbel_of(noise_triton.uniform(key, column)),
                -float("inf"),
            )
            top = tl.max(score)
            if top > best:
                best = top
                target = (at + tl.argmax(score, 0)).to(tl.int64)
    tl.store(out_tokens_ptr + base + depth, target)
    tl.store(num_emitted_ptr + request, depth + 1)


def accept(
    plan: VerifyPlan,
    probs: Tensor,
    targets: Tensor,
    coins: Tensor,
    roots: SamplingRows,
    offsets: Tensor,
) -> AcceptResult:
    """See `accept.accept_reference`."""
    assert plan.probs is not None and plan.is_sampled is not None, "the plan has no q"
    num_reqs, max_rows = plan.tokens.shape
    vocab_size = probs.shape[1]
    # Of a batch's q a plan may take the first rows of each request.
    assert plan.probs.stride()[1:] == (vocab_size, 1), "rows of q follow each other"
    ahead = torch.arange(max_rows, device=probs.device)
    positions = (roots.position[:, None] + ahead).flatten()
    keys = noise.keys(roots.seed.repeat_interleave(max_rows), positions, noise.TARGET)
    result = _new_result(plan)
    _accept_kernel[(num_reqs,)](
        plan.tokens,
        plan.parents,
        plan.num_rows,
        offsets,
        plan.is_sampled,
        probs,
        plan.probs,
        targets,
        coins,
        keys,
        probs.new_empty(num_reqs, 2, vocab_size),
        result.tokens,
        result.path,
        result.num_emitted,
        max_rows,
        vocab_size,
        plan.probs.stride(0),
        BLOCK=min(triton.next_power_of_2(vocab_size), 4096),
    )
    return result


def _new_result(plan: VerifyPlan) -> AcceptResult:
    tokens, path = plan.tokens.new_zeros((2, *plan.tokens.shape)).unbind()
    return AcceptResult(tokens=tokens, num_emitted=torch.empty_like(plan.num_rows), path=path)
