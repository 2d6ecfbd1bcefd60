"""Keys of noise streams in one launch: `reference.combine` is some thirty small operations."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.operators import operator

BLOCK = 1024
MOST_PARTS = 3


@triton.jit
def _mix64(bits):
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit
def _read(values, place, mask, VECTOR: tl.constexpr):
    if VECTOR:
        return tl.load(values + place, mask=mask, other=0)
    return tl.load(values) + tl.zeros_like(place)


@triton.jit
def _combine_kernel(
    first, part_1, part_2, part_3, out, size,
    FIRST: tl.constexpr, PART_1: tl.constexpr, PART_2: tl.constexpr, PART_3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A part is a number (kind 0), one value in memory (1), one for each key (2), or none (3)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    key = _mix64(_read(first, place, mask, FIRST == 2) + 0x1E3779B97F4A7C15)
    if PART_1 != 3:
        part = part_1 if PART_1 == 0 else _read(part_1, place, mask, PART_1 == 2)
        key = _mix64((key ^ part) + 0x1E3779B97F4A7C15)
    if PART_2 != 3:
        part = part_2 if PART_2 == 0 else _read(part_2, place, mask, PART_2 == 2)
        key = _mix64((key ^ part) + 0x1E3779B97F4A7C15)
    if PART_3 != 3:
        part = part_3 if PART_3 == 0 else _read(part_3, place, mask, PART_3 == 2)
        key = _mix64((key ^ part) + 0x1E3779B97F4A7C15)
    tl.store(out + place, key, mask=mask)


def _shape(tensors: list[Tensor]) -> torch.Size:
    return torch.broadcast_shapes(*(tensor.shape for tensor in tensors))


@operator("airmoe::combine_keys")
def combine_keys(first: Tensor, tensors: list[Tensor], numbers: list[int]) -> Tensor:
    """Fold parts into keys; the n-th part is numbers[n], or tensors in turn where that is -1."""
    shape = _shape([first, *tensors])
    out = torch.empty(shape, dtype=torch.int64, device=first.device)
    left = iter(tensors)
    parts: list[Tensor | int] = [next(left) if n == -1 else n for n in numbers]
    kinds = [_kind(part) for part in parts] + [3] * (MOST_PARTS - len(parts))
    if out.numel():
        _combine_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            first.contiguous(),
            *(p.contiguous() if isinstance(p, Tensor) else p for p in parts),
            *(0,) * (MOST_PARTS - len(parts)),
            out, out.numel(),
            FIRST=_kind(first), PART_1=kinds[0], PART_2=kinds[1], PART_3=kinds[2], BLOCK=BLOCK,
        )  # fmt: skip
    return out


@combine_keys.register_fake
def _(first: Tensor, tensors: list[Tensor], numbers: list[int]) -> Tensor:
    return first.new_empty(_shape([first, *tensors]), dtype=torch.int64)


def _kind(part: Tensor | int) -> int:
    if isinstance(part, int):
        return 0
    return 2 if part.ndim else 1
