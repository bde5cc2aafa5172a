"""Triton versions of `sampler.probabilities` and `sampler.draw`. Nothing is sorted, no host waits.

Probabilities take three launches. The first surveys stretches of rows, many programs to a row. In
the second one program per row finds which tokens stay: all whose logit is above some cut, and the
first of those equal to it. The third writes, stretch by stretch. A draw takes one for the best
token of each stretch, and torch's two to choose among these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec.params import GREEDY_TEMPERATURE, SamplingRows
from nanospec.spec import noise_triton

_STRETCH = 4096  # logits that a program surveys or writes
_GROUP = 64  # logits of which the survey keeps the largest, to guess where a row's cut is
_MAX_GROUPS = 1024  # whose largest logits are tried before the whole row is
_BLOCK = 4096  # logits at a time where one program walks a row
_DRAW_BLOCK = 1024
_DRAW_PROGRAMS = 4096  # among which the rows of a draw are divided, if there are fewer of them
_UNUSED = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # bits of fp32

# Numbers that change from round to round are not specialised on, nor is where a slice of a buffer
# starts: no round waits for a compiler.
_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
_SLICES = [f"{name}_ptr" for name in _COLUMNS]


@triton.jit
def _load_logits(row_ptr, token, vocab_size, most):
    # In fp32, and even where the row's largest one says that there is no choice.
    inside = token < vocab_size
    x = tl.load(row_ptr + token, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(most == -float("inf"), tl.where(inside, 0.0, x), x)


@triton.jit
def _weight(x, law):
    # The probability in units of the largest one, 0 where min-p forbids the token.
    most, temperature, min_p = law
    origin = tl.where(most == -float("inf"), 0.0, most)
    factor = tl.maximum(1.0 / temperature, 1.2e-38)  # not 0: 0 times -inf is nan
    weight = tl.exp((x - origin) * factor)
    return tl.where(weight < min_p, 0.0, weight)


@triton.jit
def _rank_of(x, BITS: tl.constexpr):
    # An integer that orders floats, and steps by one from a float of the logits' dtype to the next.
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> BITS


@triton.jit
def _at_rank(rank, BITS: tl.constexpr):
    bits = (rank << BITS) | ((rank >> 31) & ((1 << BITS) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(ptr, size, cut, law, BLOCK: tl.constexpr):
    # How many values are above the cut, how many equal to it, and the mass of those above.
    num_above = tl.zeros([BLOCK], dtype=tl.int32)
    num_equal = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(ptr + at, mask=at < size, other=-float("inf"))
        num_above += (x > cut).to(tl.int32)
        num_equal += (x == cut).to(tl.int32)
        mass += tl.where(x > cut, _weight(x, law), 0.0)
    return tl.sum(num_above, 0), tl.sum(num_equal, 0), tl.sum(mass, 0)


@triton.jit
def _find_cut(
    ptr, size, low, high, limit, law, BY_MASS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    # The smallest rank above `low` with less than the limit above it; `high` if there is none.
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their sum may overflow
        cut = _at_rank(middle, BITS)
        num_above, _, mass = _above(ptr, size, cut, law, BLOCK)
        is_less = mass < limit if BY_MASS else num_above < limit
        low = tl.where(is_less, low, middle)
        high = tl.where(is_less, middle, high)
    return high


@triton.jit
def _collect(row_ptr, to_ptr, vocab_size, least, law, BLOCK: tl.constexpr):
    # Copies what is not below `least`. Returns how much that is, and the mass of the whole row.
    count = 0
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _load_logits(row_ptr, token, vocab_size, law[0])
        mass += _weight(x, law)
        taken = ((token < vocab_size) & (x >= least)).to(tl.int32)
        num_taken = tl.sum(taken, 0)
        if num_taken > 0:
            tl.store(to_ptr + count + tl.cumsum(taken, 0) - 1, x, mask=taken > 0)
        count += num_taken
    tl.debug_barrier()  # another thread may read what this one wrote
    return count, tl.sum(mass, 0)


@triton.jit
def _last_equal(row_ptr, vocab_size, cut, count, most, BLOCK: tl.constexpr):
    # The token with which so many logits have been equal to the cut.
    seen = 0
    last = vocab_size
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _load_logits(row_ptr, token, vocab_size, most)
        equal = ((token < vocab_size) & (x == cut)).to(tl.int32)
        num_equal = tl.sum(equal, 0)
        if (seen < count) & (seen + num_equal >= count):
            is_reached = seen + tl.cumsum(equal, 0) >= count
            last = tl.min(tl.where(is_reached, token, vocab_size), 0)
        seen += num_equal
    return last


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _survey_kernel(
    logits_ptr,
    temperature_ptr,
    survey_ptr,
    groups_ptr,
    vocab_size,
    GROUP: tl.constexpr,
    GREEDY: tl.constexpr,
    STRETCH: tl.constexpr,
):
    # Of a stretch the largest logit, its first token and the mass of all; of a group the largest.
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    at = logits_ptr + row * vocab_size + token
    x = tl.load(at, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    groups = tl.max(tl.reshape(x, [STRETCH // GROUP, GROUP]), 1)
    most = tl.max(groups, 0)
    first = tl.min(tl.where(x == most, token, vocab_size), 0)
    temperature = tl.maximum(tl.load(temperature_ptr + row), GREEDY)
    mass = tl.sum(_weight(x, (most, temperature, 0.0)), 0)
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    stretch = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(survey_ptr + 3 * stretch, tl.where(has_nan, float("nan"), most))
    tl.store(survey_ptr + 3 * stretch + 1, first.to(tl.float32))  # exact, as all tokens are
    tl.store(survey_ptr + 3 * stretch + 2, mass)
    group = stretch * (STRETCH // GROUP) + tl.arange(0, STRETCH // GROUP)
    tl.store(groups_ptr + group, groups)


@triton.jit(do_not_specialize=["has_filters"], do_not_specialize_on_alignment=_SLICES)
def _choose_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    survey_ptr,
    groups_ptr,
    work_ptr,
    facts_ptr,
    vocab_size,
    num_stretches,
    num_groups,
    max_groups,
    has_filters,
    GREEDY: tl.constexpr,
    BITS: tl.constexpr,
    STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per row. Top-k and top-p search a copy of the largest logits, or of all where
    # these do not decide. It lies where the row's probabilities will be.
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocab_size
    work_ptr += row * vocab_size
    temperature = tl.load(temperature_ptr + row)
    is_sampled = temperature >= GREEDY
    temperature = tl.maximum(temperature, GREEDY)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_top_k = (has_filters != 0) & (top_k < vocab_size)
    has_top_p = (has_filters != 0) & (top_p < 1.0)

    stretch = tl.arange(0, STRETCHES)
    is_there = stretch < num_stretches
    survey_ptr += 3 * (row * num_stretches + stretch)
    mosts = tl.load(survey_ptr, mask=is_there, other=-float("inf"))
    firsts = tl.load(survey_ptr + 1, mask=is_there, other=vocab_size)
    masses = tl.load(survey_ptr + 2, mask=is_there, other=0.0)
    most = tl.max(mosts, 0)
    first = tl.min(tl.where(mosts == most, firsts, vocab_size), 0)
    has_nan = tl.max((mosts != mosts).to(tl.int32), 0) > 0
    is_even = (most == -float("inf")) & (has_nan == 0)
    total = tl.sum(masses * _weight(mosts, (most, temperature, 0.0)), 0)
    total = tl.where(is_even, vocab_size * 1.0, total)

    cut = -float("inf")
    last = vocab_size
    # Where the total is nan (by nan, or inf less inf) all probabilities are.
    if (has_top_k | has_top_p | (min_p > 0)) & is_sampled & (total == total):
        law = (most, temperature, min_p)
        none = (-0x7F800001 >> BITS) - 1  # the rank below that of -inf
        low = none
        high = _rank_of(tl.where(is_even, 0.0, most), BITS)
        least = float("inf")
        if has_top_k | has_top_p:
            groups_ptr += row * num_groups
            low = _find_cut(groups_ptr, num_groups, low, high, max_groups, law, False, BITS, BLOCK)
            least = _at_rank(low, BITS)
            low -= 1
        length, total = _collect(row_ptr, work_ptr, vocab_size, least, law, BLOCK)
        if has_top_k | has_top_p:
            _, _, mass = _above(work_ptr, length, -float("inf"), law, BLOCK)
            is_enough = tl.where(has_top_k, length >= top_k, mass >= top_p * total)
            if is_enough == 0:
                low = none
                length, total = _collect(row_ptr, work_ptr, vocab_size, -float("inf"), law, BLOCK)
            rank = low
            if has_top_k:
                rank = _find_cut(work_ptr, length, low, high, top_k, law, False, BITS, BLOCK)
                cut = _at_rank(rank, BITS)
                num_above, _, mass = _above(work_ptr, length, cut, law, BLOCK)
                total = mass + (top_k - num_above) * _weight(cut, law)
                low = rank - 1
            if has_top_p:
                limit = top_p * total
                rank = _find_cut(work_ptr, length, low, high, limit, law, True, BITS, BLOCK)
            cut = _at_rank(rank, BITS)
            num_above, num_equal, mass = _above(work_ptr, length, cut, law, BLOCK)
            own = _weight(cut, law)
            num_kept = num_equal
            if has_top_k:
                num_kept = tl.minimum(num_kept, (top_k - num_above).to(tl.int32))
            if has_top_p & (own > 0):
                # A token is kept while what ranks above it has not reached top-p.
                wanted = tl.maximum(tl.ceil(tl.div_rn(top_p * total - mass, own)), 1.0)
                num_kept = tl.minimum(wanted, num_kept * 1.0).to(tl.int32)
            total = mass + num_kept * own
            if num_kept < num_equal:
                last = _last_equal(row_ptr, vocab_size, cut, num_kept, most, BLOCK)
    facts_ptr += 5 * row
    tl.store(facts_ptr, most)
    tl.store(facts_ptr + 1, tl.where(has_nan, 0.0, first))
    tl.store(facts_ptr + 2, cut)
    tl.store(facts_ptr + 3, last.to(tl.float32))
    tl.store(facts_ptr + 4, 1.0 / total)


@triton.jit(do_not_specialize_on_alignment=_SLICES)
def _write_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    facts_ptr,
    out_ptr,
    vocab_size,
    GREEDY: tl.constexpr,
    STRETCH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * STRETCH + tl.arange(0, STRETCH)
    out_ptr += row * vocab_size
    facts_ptr += 5 * row
    temperature = tl.load(temperature_ptr + row)
    if temperature < GREEDY:
        one_hot = (token == tl.load(facts_ptr + 1)).to(tl.float32)
        tl.store(out_ptr + token, one_hot, mask=token < vocab_size)
    else:
        most = tl.load(facts_ptr)
        cut = tl.load(facts_ptr + 2)
        x = _load_logits(logits_ptr + row * vocab_size, token, vocab_size, most)
        weight = _weight(x, (most, temperature, tl.load(min_p_ptr + row)))
        is_kept = (x > cut) | ((x == cut) & (token <= tl.load(facts_ptr + 3)))
        probs = tl.where(is_kept, weight, 0.0) * tl.load(facts_ptr + 4)
        tl.store(out_ptr + token, probs, mask=token < vocab_size)


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See `sampler.probabilities`, of at least one row; no stop is forbidden here.

    Args:
        logits: [N, V] bf16, fp16 or fp32.
        rows: N.
    """
    logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    num_stretches = triton.cdiv(vocab_size, _STRETCH)
    num_groups = num_stretches * (_STRETCH // _GROUP)
    max_groups = min(_MAX_GROUPS, triton.cdiv(vocab_size, 2 * _GROUP))
    out = torch.empty(num_rows, vocab_size, device=logits.device)
    survey = out.new_empty(num_rows, num_stretches, 3)  # largest logit, its token, mass
    groups = out.new_empty(num_rows, num_groups)
    facts = out.new_empty(num_rows, 5)  # largest logit, its token, the cut, the last token, scale
    temperature, min_p = rows.temperature, rows.min_p
    of_rows = (temperature, rows.top_k, rows.top_p, min_p)
    sizes = (vocab_size, num_stretches, num_groups, max_groups, int(rows.has_filters))
    grid = (num_rows, num_stretches)
    by_stretch = {"STRETCH": _STRETCH, "GREEDY": GREEDY_TEMPERATURE, "num_warps": 8}
    by_row = {"STRETCHES": triton.next_power_of_2(num_stretches), "BITS": _UNUSED[logits.dtype]}
    by_row |= {"BLOCK": _BLOCK, "GREEDY": GREEDY_TEMPERATURE, "num_warps": 16}
    _survey_kernel[grid](logits, temperature, survey, groups, vocab_size, _GROUP, **by_stretch)
    _choose_kernel[(num_rows,)](logits, *of_rows, survey, groups, out, facts, *sizes, **by_row)
    _write_kernel[grid](logits, temperature, min_p, facts, out, vocab_size, **by_stretch)
    return out


@triton.jit(do_not_specialize=["stream", "num_blocks"], do_not_specialize_on_alignment=_SLICES)
def _draw_kernel(
    probs_ptr,
    seed_ptr,
    position_ptr,
    best_ptr,
    token_ptr,
    stream,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    key = noise_triton.key(tl.load(seed_ptr + row), tl.load(position_ptr + row), stream)
    best = -float("inf")
    first = tl.zeros([], dtype=tl.int32)  # the token of the best score, the first among equals
    start = tl.program_id(1) * num_blocks * BLOCK
    end = tl.minimum(start + num_blocks * BLOCK, vocab_size)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        p = tl.load(probs_ptr + row * vocab_size + token, mask=token < end, other=0.0)
        u = noise_triton.uniform(key, token)
        # A score is log(p / e), and e = -log1p(-u) is not below u: where log(p / u) is below the
        # best score, a token cannot win. Most blocks hold none that can and need no logarithms. One
        # part in a thousand is left for rounding.
        bound = 1.001 * tl.exp(-tl.maximum(best, -80.0))
        may_win = (p > 0) & (u < tl.where(best < -80.0, 2.0, p * bound))
        if tl.max(may_win.to(tl.int32), 0) > 0:
            log_p = tl.log(tl.where(p > 0, p, 1.0))
            score = tl.where(p > 0, log_p + noise_triton.gumbel_of(u), -float("inf"))
            most = tl.max(score, 0)
            if most > best:
                best = most
                first = at + tl.min(tl.where(score == most, token - at, BLOCK - 1), 0)
    to = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + to, best)
    tl.store(token_ptr + to, first.to(tl.int64))


def draw(probs: Tensor, rows: SamplingRows, stream: int) -> Tensor:
    """See `sampler.draw`, of at least one row."""
    num_rows, vocab_size = probs.shape
    most = triton.cdiv(vocab_size, _DRAW_BLOCK)  # blocks of a row
    num_blocks = triton.cdiv(most, min(most, triton.cdiv(_DRAW_PROGRAMS, num_rows)))
    num_stretches = triton.cdiv(most, num_blocks)
    best = probs.new_empty(num_rows, num_stretches)
    token = probs.new_empty(num_rows, num_stretches, dtype=torch.int64)
    columns = (rows.seed, rows.position, best, token)
    sizes, options = (vocab_size, num_blocks), {"BLOCK": _DRAW_BLOCK, "num_warps": 4}
    _draw_kernel[(num_rows, num_stretches)](probs.contiguous(), *columns, stream, *sizes, **options)
    # Tokens rise with stretches, so the first among equals stays the first. Where nothing is
    # probable that is token 0.
    return token.gather(1, best.max(dim=1, keepdim=True).indices)[:, 0]
