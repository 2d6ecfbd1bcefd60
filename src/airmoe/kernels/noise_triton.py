"""Jitter on a GPU: inside the kernels that add it, or as a tensor where no kernel does.

The integer part is that of `noise.normal`, equal to the bit. Logarithm, root and cosine come from
the GPU's special function unit, with absolute errors of about 1e-6; Triton's interpreter computes
them in float32.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import interpreted
from airmoe.kernels.noise import empty_keys

INTERPRETED = tl.constexpr(interpreted())
# The halves of $1 as the last bits of 2^23, which is faster than a conversion; then
# sqrt(-2 ln((high + 1/2) / 65536)) * cos(2 pi low / 65536), with 2^23 taken off by the additions.
BOX_MULLER = tl.constexpr("""{
    .reg .b32 high, low, exponent;
    .reg .f32 share, angle, radius, cosine;
    mov.b32 exponent, 0x4B000000;
    prmt.b32 high, $1, exponent, 0x7632;
    prmt.b32 low, $1, exponent, 0x7610;
    mov.b32 share, high;
    mov.b32 angle, low;
    fma.rn.f32 share, share, 0f37800000, 0fC2FFFFFF;
    lg2.approx.ftz.f32 share, share;
    mul.f32 share, share, 0fBFB17218;
    sqrt.approx.ftz.f32 radius, share;
    fma.rn.f32 angle, angle, 0f38C90FDB, 0fC4490FDB;
    cos.approx.ftz.f32 cosine, angle;
    mul.f32 $0, radius, cosine;
}""")
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
def normal(row_keys, columns):
    """Standard normal numbers for every (row key, column) pair, broadcast against each other.

    row_keys and columns int32 -> float32 of the broadcast shape.
    """
    spread = _wrapping_product(columns, 0x1E3779B9)
    hashed = mix32(tl.add(spread, 0x5BD1E995, sanitize_overflow=False))
    bits = mix32(hashed ^ row_keys)
    if INTERPRETED:
        radius = tl.sqrt(-2.0 * tl.log((((bits >> 16) & 0xFFFF) + 0.5) * (1 / 65536)))
        numbers = radius * tl.cos((bits & 0xFFFF) * (6.283185307179586 / 65536))
    else:
        numbers = tl.inline_asm_elementwise(
            BOX_MULLER, "=f,r", [bits], dtype=tl.float32, is_pure=True, pack=1
        )
    return numbers


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
    """A part: a number (kind 0), one value in memory (1), one for each key (2), its place (3)."""
    if KIND == 0:
        return values
    elif KIND == 1:
        return tl.load(values) + tl.zeros_like(place)
    elif KIND == 2:
        return tl.load(values + place, mask=mask, other=0)
    else:
        return place


@triton.jit
def _combine_kernel(
    first, part_1, part_2, part_3, out, size,
    FIRST: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr, PART_3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Kinds of parts are those of `_read`, and 4 for none."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    key = _mix64(_read(first, place, mask, FIRST))
    if PART_1 != 4:
        key = _mix64(key ^ _read(part_1, place, mask, PART_1))
    if PART_2 != 4:
        key = _mix64(key ^ _read(part_2, place, mask, PART_2))
    if PART_3 != 4:
        key = _mix64(key ^ _read(part_3, place, mask, PART_3))
    tl.store(out + place, key.to(out.dtype.element_ty), mask=mask)


def combine_keys(
    first: Tensor,
    tensors: list[Tensor],
    numbers: list[int],
    rows: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """`noise.combine` in one launch instead of some thirty small operations."""
    out = empty_keys(first, tensors, numbers, rows, dtype)
    left = iter(tensors)
    parts = [next(left).contiguous() if number == -1 else number for number in numbers]
    kinds = [_kind(part) for part in parts]
    if rows is not None:
        parts, kinds = [*parts, 0], [*kinds, 3]
    missing = MOST_PARTS - len(parts)
    parts, kinds = [*parts, *[0] * missing], [*kinds, *[4] * missing]
    _combine_kernel[(triton.cdiv(out.numel(), KEYS),)](
        first.contiguous(), *parts, out, out.numel(),
        FIRST=_kind(first), PART_1=kinds[0], PART_2=kinds[1], PART_3=kinds[2], BLOCK=KEYS,
    )  # fmt: skip
    return out


def _kind(part: Tensor | int) -> int:
    if isinstance(part, int):
        return 0
    return 2 if part.ndim else 1
