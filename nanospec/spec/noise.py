"""Random numbers that depend on nothing but (seed, output position, token).

A request's draws are the same alone and in any batch, and two parties that know the seed draw the
same noise. Nothing is stored between draws.

The bits are splitmix64's (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
2014): stream `key` gives `mix(key + (i + 1) * GAMMA)` as its i-th number.
"""

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_STREAM = 0xD1342543DE82EF95  # odd, so that streams have different keys
_LARGEST = 1 - 2**-24  # the largest fp32 below 1


# Streams: draws that must not know of each other take different ones.
TARGET = 0  # the target's own draw at an output position, with or without drafts
COIN = 1  # whether drafts are accepted; by the output position after the root
DRAFT = 2  # and up: a drafter's independent draws. DRAFT + d at the output position after the root
# serves depth d, so that a draft drawn again for the same place in a later round is a new draw:
# what was verified until then may depend on the old one.


def gumbel(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise [N, V] fp32 for seeds [N] and output positions [N], int64.

    The token with the largest `log p + noise` is a draw from p.
    """
    return -exponential(seed, position, stream, vocab_size).log()


def exponential(seed: Tensor, position: Tensor, stream: int, vocab_size: int) -> Tensor:
    """Return unit exponential noise [N, V] fp32; the smallest `noise / p` is a draw from p.

    The winner's noise is tiny where V is large, so precision is kept there: 63 random bits make a
    uniform number, whose relative error near 0 is that of fp32.
    """
    return -torch.log1p(-uniform(seed, position, stream, vocab_size).clamp(max=_LARGEST))


def uniform(seed: Tensor, position: Tensor, stream: int, count: int) -> Tensor:
    """Return uniform numbers [N, count] fp32 in (0, 1] for seeds [N] and positions [N]."""
    key = keys(seed, position, stream)
    steps = torch.arange(1, count + 1, device=seed.device) * _signed(_GAMMA)
    bits = _shift_right(_mix(key[:, None] + steps), 1)
    return (bits.float() + 0.5) * 2.0**-63


def keys(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Return the generator's state [N] int64 for seeds [N], output positions [N] and a stream."""
    key = _mix(seed + _signed(stream * _STREAM % 2**64))
    return _mix(key + position * _signed(_GAMMA))


def _mix(x: Tensor) -> Tensor:
    """Scramble 64-bit integers one to one."""
    for shift, factor in _MIX:
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, shift: int) -> Tensor:
    # torch's shift copies the sign bit of an int64; the generator wants zeros there.
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
