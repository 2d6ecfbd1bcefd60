"""Jitter on a GPU: inside the kernels that add it, or as a tensor where no kernel does.

The integer part is equal to the bit. The cosine is a polynomial in the exact fraction of a turn:
no rounded angle and no range reduction, so it is nearer to the true cosine than `noise.normal`,
and within a few float32 roundings of it.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 8, 256
PAIRS = 2048
KEYS = 1024
MOST_PARTS = 3


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


@triton.jit
def _rows_kernel(
    row_keys, columns, out, num_rows, num_columns, std, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, place_mask = rows < num_rows, places < num_columns
    keys = tl.load(row_keys + rows, mask=row_mask, other=0)
    names = tl.load(columns + places, mask=place_mask, other=0).to(tl.int32)
    tl.store(
        out + rows.to(tl.int64)[:, None] * num_columns + places[None, :],
        normal(keys[:, None], names[None, :]) * std,
        mask=row_mask[:, None] & place_mask[None, :],
    )


@triton.jit
def _pairs_kernel(row_keys, columns, out, size, std, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    keys = tl.load(row_keys + places, mask=mask, other=0)
    names = tl.load(columns + places, mask=mask, other=0).to(tl.int32)
    tl.store(out + places, normal(keys, names) * std, mask=mask)


def noise_rows(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    """Every row at every column: row_keys [R] int32, columns [C] -> [R, C] float32."""
    num_rows, num_columns = row_keys.shape[0], columns.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=torch.float32, device=row_keys.device)
    if out.numel():
        grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))
        _rows_kernel[grid](
            row_keys.contiguous(), columns.contiguous(), out, num_rows, num_columns, std,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


def noise_pairs(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    """Two int tensors that broadcast to one shape -> float32 of that shape."""
    row_keys, columns = torch.broadcast_tensors(row_keys, columns)
    out = torch.empty(row_keys.shape, dtype=torch.float32, device=row_keys.device)
    if out.numel():
        _pairs_kernel[(triton.cdiv(out.numel(), PAIRS),)](
            row_keys.contiguous(), columns.contiguous(), out, out.numel(), std,
            BLOCK=PAIRS, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit
def _mix64(bits):
    bits += 0x1E3779B97F4A7C15
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def _read(values, place, mask, KIND: tl.constexpr):
    """A part: a number (kind 0), one value in memory (1), or one for each key (2)."""
    if KIND == 0:
        return values
    elif KIND == 1:
        return tl.load(values) + tl.zeros_like(place)
    else:
        return tl.load(values + place, mask=mask, other=0)


@triton.jit
def _combine_kernel(
    first, part_1, part_2, part_3, out, size,
    FIRST: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr, PART_3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Kinds of parts are those of `_read`, and 3 for none."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    key = _mix64(_read(first, place, mask, FIRST))
    if PART_1 != 3:
        key = _mix64(key ^ _read(part_1, place, mask, PART_1))
    if PART_2 != 3:
        key = _mix64(key ^ _read(part_2, place, mask, PART_2))
    if PART_3 != 3:
        key = _mix64(key ^ _read(part_3, place, mask, PART_3))
    tl.store(out + place, key, mask=mask)


def combine_keys(first: Tensor, tensors: list[Tensor], numbers: list[int]) -> Tensor:
    """`noise.combine` in one launch instead of some thirty small operations."""
    left = iter(tensors)
    parts = [next(left) if number == -1 else number for number in numbers]
    shape = torch.broadcast_shapes(first.shape, *(tensor.shape for tensor in tensors))
    out = torch.empty(shape, dtype=torch.int64, device=first.device)
    kinds = [_kind(part) for part in parts] + [3] * (MOST_PARTS - len(parts))
    if out.numel():
        _combine_kernel[(triton.cdiv(out.numel(), KEYS),)](
            first.contiguous(),
            *(p.contiguous() if isinstance(p, Tensor) else p for p in parts),
            *(0,) * (MOST_PARTS - len(parts)),
            out, out.numel(),
            FIRST=_kind(first), PART_1=kinds[0], PART_2=kinds[1], PART_3=kinds[2], BLOCK=KEYS,
        )  # fmt: skip
    return out


def _kind(part: Tensor | int) -> int:
    if isinstance(part, int):
        return 0
    return 2 if part.ndim else 1
