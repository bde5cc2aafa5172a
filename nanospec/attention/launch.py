"""How paged attention is cut into programs, by what the host knows of a forward."""

from dataclasses import dataclass

import triton

from nanospec.attention.batch import LONG_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How attention is cut into programs. Results depend on it in their last bits only.

    A program takes a tile of rows, one KV head and one of `num_splits` stretches of the keys.
    """

    block_rows: int  # rows of a tile, each as many times as query heads share the KV head
    block_keys: int  # keys per step
    num_splits: int
    num_warps: int
    num_stages: int  # steps between asking for keys and needing them, plus one


def launch_shape(
    *, num_rows: int, num_reqs: int, max_rows: int, num_heads: int, num_kv_heads: int, num_sms: int
) -> LaunchShape:
    """Choose a shape for a forward of which the host knows the sizes, not the lengths.

    Args:
        num_rows: T, padding included.
        num_reqs: R, empty segments included.
        max_rows: most rows of one segment.
        num_heads: Hq.
        num_kv_heads: Hkv.
        num_sms: multiprocessors of the GPU.
    """
    group = num_heads // num_kv_heads
    # The segment of a verification should be one tile, so that its keys are read once. Tensor cores
    # take 16 rows or more; sums of 64 rows of 128 numbers still fit the registers of four warps.
    packed = min(64, triton.next_power_of_2(min(max_rows, 64) * group))
    packed = max(16, packed, triton.next_power_of_2(group))

    # A graph serves up to T segments. The rows of a round are mostly in few long ones: plain rows
    # alone have graphs of their own, in which `max_rows` is 1.
    segments = min(num_reqs, -(-num_rows // max_rows))

    def count_programs(block_rows: int) -> int:
        return max(segments * -(-max_rows // block_rows), 1) * num_kv_heads

    programs = count_programs(packed // group)
    splits, warps = 1, 4
    if max_rows >= LONG_ROWS:
        keys, stages = 64, 3
    elif programs >= 3 * num_sms:
        # Memory needs 44 KiB on their way (4.8 TB/s for 1.2 us). Where programs are many, small
        # ones bring that together, and hide each other's waits.
        keys, warps, stages = {16: (32, 2, 3), 32: (16, 2, 4)}.get(packed, (16, 4, 3))
    elif 2 * num_sms >= 16 * programs:
        # Two small ones on each multiprocessor; two warps hold sums of no more than 32 rows.
        keys, warps, stages = 16, 2 if packed <= 32 else 4, 3
        splits = _power_below(2 * num_sms / programs, most=32)
    else:
        # Few programs, so large steps; from 64 rows on Hopper's own instructions multiply.
        keys, stages = 64, 3
        packed = 16 if packed == 16 else max(packed, 64)
        programs = count_programs(packed // group)
        # A split costs the launch of the merge, some 3 us, so none where most multiprocessors are
        # busy anyway. Those past the end of a short context end at once.
        if programs < 0.8 * num_sms:
            splits = max(_power_below(num_sms / programs, most=32), 2)
    return LaunchShape(
        block_rows=packed // group,
        block_keys=keys,
        num_splits=splits,
        num_warps=warps,
        num_stages=stages,
    )


def _power_below(wanted: float, most: int) -> int:
    """Return a power of two: each number of splits has a merge kernel of its own."""
    return min(most, 1 << (int(wanted).bit_length() - 1))


def num_tiles(num_rows: int, num_reqs: int, block_rows: int) -> int:
    """Return how many tiles T rows of R segments have at most."""
    return (num_rows + min(num_reqs, num_rows) * (block_rows - 1)) // block_rows


def scratch_size(*, num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return how many fp32 numbers the splits of T rows leave to merge."""
    return num_rows * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0
