"""Jitter inside kernels: the numbers of `reference.normal`, made where they are added.

The integer part is equal to the bit. The cosine is a polynomial in the exact fraction of a turn:
no rounded angle and no range reduction, so it is nearer to the true cosine than the reference,
and within a few float32 roundings of it.
"""

# pyright: reportArgumentType=none

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wrapping_product(bits, factor):
    return tl.mul(bits, factor, sanitize_overflow=False)  # or Triton's debug mode would complain


@triton.jit
def mix32(bits):
    """A bijective scrambling of int32; products wrap around, masks make the shifts logical."""
    bits = _wrapping_product(bits ^ ((bits >> 16) & 0xFFFF), 0x7FEB352D)
    bits = _wrapping_product(bits ^ ((bits >> 15) & 0x1FFFF), -0x7B935975)
    return bits ^ ((bits >> 16) & 0xFFFF)


@triton.jit
def _float_of(small):
    """float32 of an int32 in [0, 65536), as the last bits of 2^23: conversions are slow."""
    return (small | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def cosine_of_turn(turn):
    """cos(2 pi turn / 65536) for int32 turns in [0, 65536): absolute error under 2e-7.

    Folding the circle at its diameter leaves sin(pi/2 x) with an exact x in [-1, 1]; the
    polynomial (least maximum error in x^2) is off by 4e-9, the rest is rounding.
    """
    x = 1.0 - tl.minimum(_float_of(turn), 65536.0 - _float_of(turn)) * (1.0 / 16384.0)
    square = x * x
    series = square * 1.50820557e-4 - 4.672227905e-3
    series = square * series + 7.968848052e-2
    series = square * series - 6.4596335986e-1
    return x * (square * series + 1.5707962900)


@triton.jit
def log_of_share(number):
    """ln((number + 1/2) / 65536) for int32 numbers in [0, 65536), to float32's last bits.

    The number is m 2^e with m between sqrt(1/2) and sqrt(2); ln m is f - f^2/2 + f^3 P(f) with
    f = m - 1, which keeps its leading digits where the share is almost 1.
    """
    bits = (_float_of(number) + 0.5).to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    series = f * 8.7004498e-2 - 1.42674953e-1
    series = f * series + 1.49147674e-1
    series = f * series - 1.65775836e-1
    series = f * series + 1.99630633e-1
    series = f * series - 2.50013381e-1
    series = f * series + 3.33339095e-1
    mantissa_log = f + f * f * (f * series - 0.5)
    return (_float_of(exponent + 1) - 17.0) * 0.69314718056 + mantissa_log


@triton.jit
def normal(row_keys, columns):
    """Standard normal numbers for every (row key, column) pair, broadcast against each other.

    row_keys and columns int32 -> float32 of the broadcast shape.
    """
    spread = _wrapping_product(columns, 0x1E3779B9)
    hashed = mix32(tl.add(spread, 0x5BD1E995, sanitize_overflow=False))
    bits = mix32(hashed ^ row_keys)
    radius = tl.sqrt(-2.0 * log_of_share((bits >> 16) & 0xFFFF))
    return radius * cosine_of_turn(bits & 0xFFFF)
