"""Counter-based normal numbers: the same key gives the same number, in any order or chunking.

32-bit integer mixing followed by Box-Muller. int32 products wrap around, as unsigned ones would.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mix64(bits: Tensor) -> Tensor:
    """A bijective scrambling of int64 (the splitmix64 finaliser)."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


def mix32_(bits: Tensor) -> Tensor:
    """A bijective scrambling of int32, in place."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(-0x7B935975)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def combine(first: Tensor, *rest: Tensor | int) -> Tensor:
    """Fold integers into one int64 key, broadcasting."""
    key = mix64(first + 0x1E3779B97F4A7C15)
    for part in rest:
        key = mix64((key ^ part) + 0x1E3779B97F4A7C15)
    return key


def uniform_index(keys: Tensor, bound: Tensor) -> Tensor:
    """One whole number in [0, bound) per key; 0 where the bound is 0."""
    spread = (keys & 0x7FFFFFFFFFFFFFFF) >> 1
    return torch.where(bound > 0, spread % bound.clamp_min(1), torch.zeros_like(spread))


def normal(row_keys: Tensor, columns: Tensor) -> Tensor:
    """Standard normal numbers for every (row key, column) pair, broadcast against each other.

    row_keys int32, columns int64 -> float32 of the broadcast shape.
    """
    hashed = mix32_(columns.to(torch.int32) * 0x1E3779B9 + 0x5BD1E995)
    bits = mix32_(torch.bitwise_xor(hashed, row_keys))
    radius = ((bits >> 16) & 0xFFFF).float().add_(0.5).mul_(1 / 65536).log_().mul_(-2).sqrt_()
    angle = (bits & 0xFFFF).float().mul_(2 * math.pi / 65536).cos_()
    return radius.mul_(angle)
