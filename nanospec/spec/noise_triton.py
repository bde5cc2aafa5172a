"""`noise` inside of kernels: the same bits, one number per token."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def key(seed, position, stream):
    """See `noise.keys`; one int64 seed and position, as uint64."""
    mixed = _mix(seed.to(tl.uint64, bitcast=True) + stream.to(tl.uint64) * 0xD1342543DE82EF95)
    return _mix(mixed + position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15)


@triton.jit
def uniform(key, token):
    """See `noise.uniform`; fp32, one for each token."""
    bits = _mix(key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 1
    return (bits.to(tl.int64).to(tl.float32) + 0.5) * 1.0842021724855044e-19  # 2 ** -63


@triton.jit
def gumbel_of(uniform):
    """See `noise.gumbel`; of uniform numbers."""
    u = tl.minimum(uniform, 0.99999994)
    # -log1p(-u): its series near 0, where 1 - u would lose the digits of u.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return -tl.log(tl.where(u < 0.05, series, -tl.log(1.0 - u)))
