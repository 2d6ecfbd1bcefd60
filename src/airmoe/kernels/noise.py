"""Jitter as a pure function of (seed, rank, micro-batch, stage, row, column): the row is a token or
a codeword, the column an expert.

Recomputed forwards draw the same numbers, and no generator state is touched. Numbers are made by
32-bit integer mixing followed by Box-Muller; int32 products wrap around, as unsigned ones would.
Codebooks draw their tokens in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.backend import operator, use_triton, with_kernel


class Stage(IntEnum):
    """What a key is for; different stages never share numbers."""

    SHORTLIST = 1
    TOKEN = 2
    CLUSTER = 3
    SUBKEY = 4
    REPLACE = 5
    FIRST_BATCH = 6
    RANDOM_CODEWORDS = 7


@dataclass(frozen=True)
class Noise:
    """Normal jitter of one stage: one stream per row (token or codeword), indexed by column."""

    row_keys: Tensor  # [rows] int32
    std: float

    def rows(self, chosen: Tensor | slice, columns: Tensor) -> Tensor:
        """Jitter for some rows at all the given columns: [rows, columns] float32."""
        return noise_rows(self.row_keys[chosen], columns, self.std)

    def pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Jitter for (row, column) pairs of one broadcast shape."""
        return noise_pairs(self.row_keys[rows], columns, self.std)


@with_kernel("noise_triton")
def noise_rows(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    """Every row at every column: row_keys [R] int32, columns [C] -> [R, C] float32."""
    return normal(row_keys.unsqueeze(-1), columns).mul_(std)


@with_kernel("noise_triton")
def noise_pairs(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    """row_keys int32 and columns, broadcast against each other -> float32 of that shape."""
    return normal(row_keys, columns).mul_(std)


def noise_operands(noise: Noise | None) -> tuple[Tensor | None, float]:
    """As operators take it: the row keys, None where there is no noise, and the deviation."""
    return (None, 0.0) if noise is None else (noise.row_keys, noise.std)


def make_noise(key: Tensor, stage: Stage, num_rows: int, std: float) -> Noise:
    """One stream per row from a micro-batch key (int64 scalar)."""
    return Noise(combine(key, int(stage), rows=num_rows, dtype=torch.int32), std)


def combine(
    first: Tensor,
    *rest: Tensor | int,
    rows: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Fold whole numbers, at most three after the first, into one key, broadcasting.

    Tensors are int64, scalars or vectors of one length; numbers are not negative. With `rows` the
    last number is 0 in the first of so many keys, 1 in the second, and so on. An int32 key is the
    lower half of the int64 one.
    """
    if use_triton(first):
        tensors = [part for part in rest if isinstance(part, Tensor)]
        numbers = [-1 if isinstance(part, Tensor) else part for part in rest]
        return combine_keys(first, tensors, numbers, rows, dtype)
    own = () if rows is None else (torch.arange(rows, device=first.device),)
    key = first
    for part in (None, *rest, *own):
        key = (key if part is None else key ^ part) + 0x1E3779B97F4A7C15
        # A bijective scrambling of int64, the split_mix64 finaliser; masks make the shifts logical.
        key = (key ^ ((key >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
        key = (key ^ ((key >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
        key = key ^ ((key >> 31) & 0x1FFFFFFFF)
    return key.to(dtype)


def empty_keys(
    first: Tensor, tensors: list[Tensor], _numbers: Any, rows: int | None, dtype: torch.dtype
) -> Tensor:
    vectors = [tensor.shape for tensor in (first, *tensors) if tensor.ndim]
    shape = vectors[0] if vectors else () if rows is None else (rows,)
    return first.new_empty(shape, dtype=dtype)


# `combine` in one launch: the n-th part is numbers[n], or tensors in turn where that is -1.
combine_keys = operator(
    "combine_keys(Tensor first, Tensor[] tensors, SymInt[] numbers, SymInt? rows, "
    "ScalarType dtype) -> Tensor",
    "noise_triton",
    fake=empty_keys,
)


def normal(row_keys: Tensor, columns: Tensor) -> Tensor:
    """Standard normal numbers for every (row key, column) pair, broadcast against each other.

    row_keys int32, columns int64 -> float32 of the broadcast shape.
    """
    hashed = _mix32_(columns.to(torch.int32) * 0x1E3779B9 + 0x5BD1E995)
    bits = _mix32_(torch.bitwise_xor(hashed, row_keys))
    radius = ((bits >> 16) & 0xFFFF).float().add_(0.5).mul_(1 / 65536).log_().mul_(-2).sqrt_()
    angle = (bits & 0xFFFF).float().mul_(2 * math.pi / 65536).cos_()
    return radius.mul_(angle)


def _mix32_(bits: Tensor) -> Tensor:
    """A bijective scrambling of int32, in place."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(-0x7B935975)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
