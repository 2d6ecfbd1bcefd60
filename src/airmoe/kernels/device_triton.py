"""What several kernels share: exact products, roots, masks, searches, and picking the largest.

A float32 number is the exact sum of three bfloat16 numbers, its parts. Matrix units multiply
16-bit numbers, so products as exact as float32 are made of products of parts.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import interpreted

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))
SPLIT_BLOCK = 1024


# Products


def dot_precision(dtype: torch.dtype) -> str:
    """Float32 products as exact as float32, by three products of the matrix units."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def part_dtype() -> tl.dtype:
    """Of the parts of a float32 number; the interpreter knows no bfloat16."""
    return tl.float32 if interpreted() else tl.bfloat16


def as_stored(table: Tensor) -> Tensor:
    """The table as kernels read it: bfloat16 as float32 under the interpreter, which spoils it."""
    return (
        table.to(_bfloat16()).contiguous() if table.dtype == torch.bfloat16 else table.contiguous()
    )


def _bfloat16() -> torch.dtype:
    return torch.float32 if interpreted() else torch.bfloat16


@triton.jit
def upper_half(values):
    """float32 cut to the 8 leading bits that bfloat16 has."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def cut(values, PART: tl.constexpr):
    """float32 as three bfloat16 numbers that add up to it, the largest first."""
    first = upper_half(values)
    rest = values - first
    second = upper_half(rest)
    return first.to(PART), second.to(PART), (rest - second).to(PART)


@triton.jit
def _split_kernel(values_ptr, parts_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    rest = tl.load(values_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(3):
        upper = upper_half(rest)
        tl.store(parts_ptr + part * size + at, upper.to(parts_ptr.dtype.element_ty), mask=mask)
        rest -= upper


def bfloat16_parts(values: Tensor) -> Tensor:
    """[3, ...] bfloat16 numbers that add up to `values` exactly, the largest first."""
    parts = torch.empty(3, *values.shape, dtype=_bfloat16(), device=values.device)
    size = values.numel()
    if size:
        grid = (triton.cdiv(size, SPLIT_BLOCK),)
        _split_kernel[grid](values.contiguous(), parts, size, BLOCK=SPLIT_BLOCK, num_warps=4)
    return parts


@triton.jit
def dot(
    left, right, total,
    TRANS_LEFT: tl.constexpr, TRANS_RIGHT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """total + left @ right, either of them transposed first, as exact as their dtype."""
    if left.dtype == tl.float32:
        total = _exact_dot(left, right, total, TRANS_LEFT, TRANS_RIGHT, PART)
    else:
        if TRANS_LEFT:
            left = tl.trans(left)
        if TRANS_RIGHT:
            right = tl.trans(right)
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _exact_dot(
    left, right, total,
    TRANS_LEFT: tl.constexpr, TRANS_RIGHT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The same for float32 operands.

    Of the products of parts the six that reach a float32's last bit are taken. As fast as "tf32x3"
    in the matrix units, which however take transposed operands in 16 bits only: of 32-bit ones
    every number is fetched alone.
    """
    left_1, left_2, left_3 = cut(left, PART)
    right_1, right_2, right_3 = cut(right, PART)
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
def inverse_root(square):
    """1 / |w| from |w|^2, 0 for a zero row."""
    return tl.where(square > 0, 1.0 / tl.sqrt_rn(tl.where(square > 0, square, 1.0)), 0.0)


# Searching and selecting


@triton.jit
def count_below(keys, num_keys, bounds, steps):
    """How many of the ascending keys are below each bound; num_keys < 2 ** steps."""
    count = tl.zeros_like(bounds)
    for step in range(0, steps):
        probe = count + (1 << (steps - 1 - step))
        inside = probe <= num_keys
        key = tl.load(keys + probe - 1, mask=inside, other=0)
        count = tl.where(inside & (key < bounds), probe, count)
    return count


@triton.jit
def finite_from_above(scores):
    """Scores for selecting: +inf and NaN become the largest number, as they are in the reference.

    Halving an interval needs finite ends; -inf is dealt with where the search starts.
    """
    return tl.minimum(tl.where(scores == scores, scores, FLOAT32_MAX), FLOAT32_MAX)


@triton.jit
def count_where(chosen):
    """How many are true. As float32: one instruction sets 1.0, the sum uses the other pipe."""
    return tl.sum(chosen.to(tl.float32), axis=0)


@triton.jit
def last_equal(scores, position, threshold, count, BLOCK: tl.constexpr):
    """The position up to which scores equal to the threshold belong to the `count` largest."""
    needed = count - count_where(scores > threshold)
    first = 0
    last = BLOCK - 1
    while first < last:
        middle = (first + last) // 2
        enough = count_where((scores == threshold) & (position <= middle)) >= needed
        first = tl.where(enough, first, middle + 1)
        last = tl.where(enough, middle, last)
    return last


@triton.jit
def largest(scores, position, length, count, BLOCK: tl.constexpr):
    """(threshold, last): the `count` largest of `scores` [BLOCK], ties to the lowest position.

    They are the scores above the threshold and those equal to it at positions up to `last`.
    Scores must come from `finite_from_above`; at positions from `length` on they must be -inf.
    """
    real = scores > -INFINITY
    low = tl.min(tl.where(real, scores, FLOAT32_MAX), axis=0)
    high = tl.max(scores, axis=0)
    reached = count_where(real)  # so many scores are at least `low`
    short = reached < count  # then -inf itself is at the border
    low = tl.where(short, -INFINITY, tl.where(count == 1, high, low))
    high = tl.where(short, -INFINITY, high)
    reached = tl.where(short, length * 1.0, reached)
    middle = 0.5 * low + 0.5 * high
    while (reached != count) & (middle > low) & (middle < high):
        number = count_where(scores >= middle)
        enough = number >= count
        reached = tl.where(enough, number, reached)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = 0.5 * low + 0.5 * high
    last = length - 1
    if reached != count:  # neighbouring numbers: the border runs through equal scores
        low = tl.where(count_where(scores >= high) >= count, high, low)
        last = last_equal(scores, position, low, count, BLOCK)
    return low, last
