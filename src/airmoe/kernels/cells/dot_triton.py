"""Products of two tiles, as exact as their dtype."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

import torch
import triton
import triton.language as tl

from airmoe.kernels.backend import interpreted


def dot_precision(dtype: torch.dtype) -> str:
    """Float32 products as exact as float32, by three products of the matrix units."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def part_dtype() -> tl.dtype:
    """Of the parts of a float32 number; the interpreter knows no bfloat16."""
    return tl.float32 if interpreted() else tl.bfloat16


@triton.jit
def _part(values, PART: tl.constexpr):
    """The 8 leading bits, as bfloat16 has them, and what they leave."""
    upper = (values.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return upper.to(PART), values - upper


@triton.jit
def _exact_dot(
    left, right, total,
    TRANS_LEFT: tl.constexpr, TRANS_RIGHT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """total + left @ right of float32 operands, either of them transposed first.

    Each is cut into three bfloat16 parts, and of their products the six that reach a float32's
    last bit are taken. As fast as "tf32x3" in the matrix units, which however take transposed
    operands in 16 bits only: of 32-bit ones every number is fetched alone.
    """
    left_1, rest = _part(left, PART)
    left_2, rest = _part(rest, PART)
    left_3 = rest.to(PART)
    right_1, rest = _part(right, PART)
    right_2, rest = _part(rest, PART)
    right_3 = rest.to(PART)
    if TRANS_LEFT:
        left_1, left_2, left_3 = tl.trans(left_1), tl.trans(left_2), tl.trans(left_3)
    if TRANS_RIGHT:
        right_1, right_2, right_3 = tl.trans(right_1), tl.trans(right_2), tl.trans(right_3)
    # The small ones first, and none of them onto the total: the matrix units cut off what they add.
    product = tl.dot(left_3, right_1)
    product = tl.dot(left_1, right_3, product)
    product = tl.dot(left_2, right_2, product)
    product = tl.dot(left_2, right_1, product)
    product = tl.dot(left_1, right_2, product)
    return total + tl.dot(left_1, right_1, product)


@triton.jit
def dot(
    left, right, total,
    TRANS_LEFT: tl.constexpr, TRANS_RIGHT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    if left.dtype == tl.float32:
        total = _exact_dot(left, right, total, TRANS_LEFT, TRANS_RIGHT, PART)
    else:
        if TRANS_LEFT:
            left = tl.trans(left)
        if TRANS_RIGHT:
            right = tl.trans(right)
        total = tl.dot(left, right, total)
    return total
