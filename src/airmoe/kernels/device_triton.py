"""What several kernels share: exact products, rows of tables, searches, selection, activations.

A float32 number is the exact sum of three bfloat16 numbers, its parts. Matrix units multiply
16-bit numbers, so products as exact as float32 are made of products of parts.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

from typing import get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import interpreted
from airmoe.kernels.token_experts import Activation

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))
SPLIT_BLOCK = 1024


def block_size(size: int, most: int) -> int:
    """A power of two for one direction of a tile: `size` at once where that is not too large."""
    return max(16, min(triton.next_power_of_2(size), most))


# Products


def dot_precision(dtype: torch.dtype) -> str:
    """Float32 products as exact as float32, by three products of the matrix units."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def part_dtype() -> tl.dtype:
    """Of the parts of a float32 number; the interpreter knows no bfloat16."""
    return tl.float32 if interpreted() else tl.bfloat16


def as_stored(table: Tensor) -> Tensor:
    """The table as kernels read it: bfloat16 as float32 under the interpreter, which spoils it."""
    return (table.to(_bfloat16()) if table.dtype == torch.bfloat16 else table).contiguous()


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
    grid = (triton.cdiv(size, SPLIT_BLOCK),)
    _split_kernel[grid](values.contiguous(), parts, size, BLOCK=SPLIT_BLOCK, num_warps=4)
    return parts


@triton.jit
def _turned(values, TURN: tl.constexpr):
    return tl.trans(values) if TURN else values


@triton.jit
def dot(
    left, right, total,
    TRANS_LEFT: tl.constexpr, TRANS_RIGHT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """total + left @ right, either of them transposed first, as exact as their dtype.

    Of float32 operands' parts the six products that reach a float32's last bit are taken. As fast
    as "tf32x3" in the matrix units, which however take transposed operands in 16 bits only: of
    32-bit ones every number is fetched alone.
    """
    if left.dtype == tl.float32:
        left_1, left_2, left_3 = cut(left, PART)
        right_1, right_2, right_3 = cut(right, PART)
        left_1, right_1 = _turned(left_1, TRANS_LEFT), _turned(right_1, TRANS_RIGHT)
        left_2, right_2 = _turned(left_2, TRANS_LEFT), _turned(right_2, TRANS_RIGHT)
        left_3, right_3 = _turned(left_3, TRANS_LEFT), _turned(right_3, TRANS_RIGHT)
        # The small ones first, none of them onto the total: matrix units cut off what they add.
        product = tl.dot(left_3, right_1)
        product = tl.dot(left_1, right_3, product)
        product = tl.dot(left_2, right_2, product)
        product = tl.dot(left_2, right_1, product)
        product = tl.dot(left_1, right_2, product)
        total += tl.dot(left_1, right_1, product)
    else:
        total = tl.dot(_turned(left, TRANS_LEFT), _turned(right, TRANS_RIGHT), total)
    return total


@triton.jit
def inverse_root(square):
    """1 / |w| from |w|^2, 0 for a zero row."""
    return tl.where(square > 0, 1.0 / tl.sqrt_rn(tl.where(square > 0, square, 1.0)), 0.0)


# Rows of tables, tiles of cells


@triton.jit
def load_rows(table, rows, mask, columns, WIDTH: tl.constexpr):
    """[rows, columns] of a table [.., WIDTH]; 0 where the row's mask is not set."""
    return tl.load(
        table + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :],
        mask=mask[:, None] & (columns < WIDTH)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(table, rows, mask, columns, values, WIDTH: tl.constexpr):
    """Values [rows, columns] to a table [.., WIDTH], in its dtype."""
    tl.store(
        table + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :],
        values.to(table.dtype.element_ty),
        mask=mask[:, None] & (columns < WIDTH)[None, :],
    )


@triton.jit
def rows_of_tile(tile_first, offsets, token_ids, tile, cell, BLOCK_T: tl.constexpr):
    """(rows, which of them are the cell's, their tokens) of a tile."""
    rows = tl.load(tile_first + tile) + tl.arange(0, BLOCK_T)
    mask = rows < tl.load(offsets + cell + 1)
    return rows, mask, tl.load(token_ids + rows, mask=mask, other=0)


@triton.jit
def part_of_pool(pools, cell, first, POOL: tl.constexpr, BLOCK_P: tl.constexpr):
    """(positions from `first` on, which of them are real, the ids there) of a cell's pool."""
    places = first + tl.arange(0, BLOCK_P)
    mask = places < POOL
    return places, mask, tl.load(pools + cell.to(tl.int64) * POOL + places, mask=mask, other=0)


@triton.jit
def operands_of_tile(
    tile_first, offsets, token_ids, pools, tile, cell,
    POOL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Both, for the part of the pool that is this program's."""
    rows, row_mask, tokens = rows_of_tile(tile_first, offsets, token_ids, tile, cell, BLOCK_T)
    first = tl.program_id(0) * BLOCK_P
    places, place_mask, ids = part_of_pool(pools, cell, first, POOL, BLOCK_P)
    return rows, row_mask, tokens, places, place_mask, ids


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
def _ends(scores, length, count):
    """(least, greatest, how many reach the least); all -inf where -inf is at the border."""
    real = scores > -INFINITY
    low = tl.min(tl.where(real, scores, FLOAT32_MAX), axis=0)
    high = tl.max(scores, axis=0)
    reached = count_where(real)
    short = reached < count
    low = tl.where(short, -INFINITY, low)
    high = tl.where(short, -INFINITY, high)
    return low, high, tl.where(short, length * 1.0, reached)


@triton.jit
def _halve(scores, low, high, reached, count, room):
    """(threshold, reached): halve the interval until at most `room` scores reach its lower end.

    At least `count` do. Where more than `room` still do, the threshold is the `count`-th largest
    score and has equals: the ends were neighbouring numbers.
    """
    middle = 0.5 * low + 0.5 * high
    while (reached > room) & (middle > low) & (middle < high):
        number = count_where(scores >= middle)
        enough = number >= count
        reached = tl.where(enough, number, reached)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = 0.5 * low + 0.5 * high
    if reached > room:
        low = tl.where(count_where(scores >= high) >= count, high, low)
    return low, reached


@triton.jit
def border(scores, length, count, room):
    """(threshold, reached): at least `count` scores reach the threshold, if possible `room`.

    Scores must come from `finite_from_above`; `length` of them are real, the others -inf.
    """
    low, high, reached = _ends(scores, length, count)
    return _halve(scores, low, high, reached, count, room)


@triton.jit
def largest(scores, position, length, count, BLOCK: tl.constexpr):
    """(threshold, last): the `count` largest of `scores` [BLOCK], ties to the lowest position.

    They are the scores above the threshold and those equal to it at positions up to `last`.
    Scores must come from `finite_from_above`; at positions from `length` on they must be -inf.
    """
    low, high, reached = _ends(scores, length, count)
    low = tl.where(count == 1, high, low)
    low, reached = _halve(scores, low, high, reached, count, count)
    last = length - 1
    if reached != count:
        last = last_equal(scores, position, low, count, BLOCK)
    return low, last


# Activations

# Kernels are compiled for one activation: the code is a compile-time constant.
ACTIVATION_CODES: dict[str, int] = {name: code for code, name in enumerate(get_args(Activation))}
_SWIGLU = tl.constexpr(ACTIVATION_CODES["swiglu"])
_GEGLU = tl.constexpr(ACTIVATION_CODES["geglu"])
_GELU = tl.constexpr(ACTIVATION_CODES["gelu"])
_RELU = tl.constexpr(ACTIVATION_CODES["relu"])
_SILU = tl.constexpr(ACTIVATION_CODES["silu"])
_GEGLU_TANH = tl.constexpr(ACTIVATION_CODES["geglu_tanh"])
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_TANH_CUBIC = tl.constexpr(0.044715)
_LARGEST_SQUARE = tl.constexpr(1e6)  # of its input: the sigmoid is 0 or 1 long before
_NORMAL_PEAK = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi), the normal density at 0
# log2(e) as a float32, and what is missing of it.
_LOG2_E = tl.constexpr(1.44269502162933349609375)
_LOG2_E_REST = tl.constexpr(1.92596299112661746887e-8)
_LN_2 = tl.constexpr(0.6931471805599453)
_LARGEST_POWER = tl.constexpr(128.0)  # of 2: infinite, or 0, and neither can be corrected


@triton.jit
def activate(up, gate, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """`token_experts.activate`: act(up), or act(gate) * up for gated ones; float32, elementwise.

    Pass `up` again as `gate` where there is none. EXACT is for operands that are float32
    themselves: the quick exponential is off by some of their last bits.
    """
    if ACTIVATION == _SWIGLU:
        active = _silu(gate, EXACT) * up
    elif ACTIVATION == _GEGLU:
        active = _gelu(gate) * up
    elif ACTIVATION == _GEGLU_TANH:
        active = _gelu_tanh_and_slope(gate, EXACT)[0] * up
    elif ACTIVATION == _GELU:
        active = _gelu(up)
    elif ACTIVATION == _SILU:
        active = _silu(up, EXACT)
    else:
        tl.static_assert(ACTIVATION == _RELU)
        active = tl.where(up <= 0.0, 0.0, up)  # this way round NaN stays NaN
    return active


@triton.jit
def activation_grads(up, gate, grad, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """(active, gradient of up, gradient of gate), given the gradient of `active`; float32.

    For plain activations the third is meaningless: ignore it.
    """
    if ACTIVATION == _RELU:
        active = tl.where(up <= 0.0, 0.0, up)
        grad_up = tl.where(up <= 0.0, 0.0, grad)
        grad_gate = grad_up
    elif (ACTIVATION == _GELU) | (ACTIVATION == _SILU):
        active, slope = _plain_and_slope(up, ACTIVATION, EXACT)
        grad_up = grad * slope
        grad_gate = grad_up
    else:
        plain, slope = _plain_and_slope(gate, ACTIVATION, EXACT)
        active, grad_up, grad_gate = plain * up, grad * plain, grad * up * slope
    return active, grad_up, grad_gate


@triton.jit
def _plain_and_slope(values, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    if (ACTIVATION == _SWIGLU) | (ACTIVATION == _SILU):
        plain, slope = _silu_and_slope(values, EXACT)
    elif ACTIVATION == _GEGLU_TANH:
        plain, slope = _gelu_tanh_and_slope(values, EXACT)
    else:
        plain, slope = _gelu_and_slope(values, EXACT)
    return plain, slope


@triton.jit
def _exp(values, EXACT: tl.constexpr):
    if EXACT:
        power = values * _LOG2_E
        rest = tl.fma(values, _LOG2_E, -power) + values * _LOG2_E_REST
        result = tl.exp2(power)
        corrected = result + result * (rest * _LN_2)
        result = tl.where(tl.abs(power) < _LARGEST_POWER, corrected, result)
    else:
        result = tl.exp(values)
    return result


@triton.jit
def _over(above, below, EXACT: tl.constexpr):
    return tl.div_rn(above, below) if EXACT else above / below


@triton.jit
def _silu(values, EXACT: tl.constexpr):
    return _over(values, 1.0 + _exp(-values, EXACT), EXACT)


@triton.jit
def _silu_and_slope(values, EXACT: tl.constexpr):
    sigmoid = _over(1.0, 1.0 + _exp(-values, EXACT), EXACT)
    return values * sigmoid, sigmoid * (1.0 + values * (1.0 - sigmoid))


@triton.jit
def _gelu(values):
    return 0.5 * values * (1.0 + tl.erf(values * _SQRT_HALF))


@triton.jit
def _gelu_and_slope(values, EXACT: tl.constexpr):
    below = 0.5 * (1.0 + tl.erf(values * _SQRT_HALF))  # normal distribution function
    density = _exp(-0.5 * values * values, EXACT) * _NORMAL_PEAK
    return values * below, below + values * density


@triton.jit
def _gelu_tanh_and_slope(values, EXACT: tl.constexpr):
    """0.5 (1 + tanh(z)) is the sigmoid of 2 z, which needs no tanh."""
    squares = tl.minimum(values * values, _LARGEST_SQUARE)
    # Constants on the right: on the left, Triton 3.9's interpreter makes a constant of the product.
    below = 1.0 + _exp(values * -_TANH_SCALE * (1.0 + squares * _TANH_CUBIC), EXACT)
    sigmoid = _over(1.0, below, EXACT)
    inner = (1.0 + squares * (3.0 * _TANH_CUBIC)) * _TANH_SCALE
    plain = values * sigmoid  # before `inner`, so that a sigmoid of 0 meets nothing infinite
    return plain, sigmoid + plain * (1.0 - sigmoid) * inner
