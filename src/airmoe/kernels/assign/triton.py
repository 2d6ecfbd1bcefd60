"""Nearest codeword without a [T, G] matrix: a product whose every tile goes into a running best.

Products are as exact as float32. A float32 number is the exact sum of three bfloat16 numbers, so
against bfloat16 tokens three bfloat16 products of the tensor cores do it; against other tokens the
float32 product is made of three tf32 ones. A few tokens have kernels of their own
(`small_batch_triton`): here one program would walk all codewords alone.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import interpreted

SPLIT_BLOCK = 1024
INFINITY = tl.constexpr(float("inf"))


@dataclass(frozen=True)
class _Config:
    block_tokens: int
    block_codewords: int
    block_dim: int
    num_warps: int
    num_stages: int
    max_registers: int | None  # 128 lets two programs share an SM, one multiplying, one comparing


def _config(num_codewords: int, dim: int, parts: int) -> _Config:
    codewords = min(128, max(16, triton.next_power_of_2(num_codewords)))
    depth = min(32, max(16, triton.next_power_of_2(dim)))
    return _Config(128, codewords, depth, 8, 3, 128 if parts > 1 else None)


@triton.jit
def upper_half(values):
    """float32 cut to the 8 leading bits that bfloat16 has."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split_kernel(values_ptr, parts_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    rest = tl.load(values_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(3):
        upper = upper_half(rest)
        tl.store(parts_ptr + part * size + at, upper.to(parts_ptr.dtype.element_ty), mask=mask)
        rest -= upper


def as_stored(table: Tensor) -> Tensor:
    """The table as kernels read it: bfloat16 as float32 under the interpreter, which spoils it."""
    return (
        table.to(_bfloat16()).contiguous() if table.dtype == torch.bfloat16 else table.contiguous()
    )


def _bfloat16() -> torch.dtype:
    return torch.float32 if interpreted() else torch.bfloat16


def bfloat16_parts(values: Tensor) -> Tensor:
    """[3, ...] bfloat16 numbers that add up to `values` exactly, the largest first."""
    parts = torch.empty(3, *values.shape, dtype=_bfloat16(), device=values.device)
    size = values.numel()
    if size:
        grid = (triton.cdiv(size, SPLIT_BLOCK),)
        _split_kernel[grid](values.contiguous(), parts, size, BLOCK=SPLIT_BLOCK, num_warps=4)
    return parts


@triton.jit
def _similarity(
    hidden_ptr, codewords_ptr, part_stride, token, codeword, num_tokens, num_codewords, dim,
    PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, BLOCK_G] products of some tokens with some codewords."""
    depth = tl.arange(0, BLOCK_D)
    hidden_at = hidden_ptr + token.to(tl.int64)[:, None] * dim + depth[None, :]
    codewords_at = codewords_ptr + codeword.to(tl.int64)[None, :] * dim + depth[:, None]
    products = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.float32)
    for start in range(0, dim, BLOCK_D):
        inside = depth < dim - start
        token_mask = (token < num_tokens)[:, None] & inside[None, :]
        codeword_mask = (codeword < num_codewords)[None, :] & inside[:, None]
        hidden = tl.load(hidden_at + start, mask=token_mask, other=0.0)
        if PARTS == 1:
            words = tl.load(codewords_at + start, mask=codeword_mask, other=0.0)
            products = tl.dot(hidden.to(tl.float32), words, products, input_precision="tf32x3")
        else:
            for part in tl.static_range(PARTS):
                words = tl.load(
                    codewords_at + part * part_stride + start, mask=codeword_mask, other=0.0
                )
                products = tl.dot(hidden, words, products)
    return products


@triton.jit
def _nearest_kernel(
    hidden_ptr, codewords_ptr, offsets_ptr, out_ptr, num_tokens, num_codewords, dim, part_stride,
    EUCLIDEAN: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    best = tl.full((BLOCK_T,), -INFINITY, dtype=tl.float32)
    nearest = tl.zeros((BLOCK_T,), dtype=tl.int32)
    for first in range(0, num_codewords, BLOCK_G):
        codeword = first + tl.arange(0, BLOCK_G)
        similarity = _similarity(
            hidden_ptr, codewords_ptr, part_stride, token, codeword, num_tokens, num_codewords,
            dim, PARTS, BLOCK_T, BLOCK_G, BLOCK_D,
        )  # fmt: skip
        real = codeword < num_codewords
        if EUCLIDEAN:
            similarity -= tl.load(offsets_ptr + codeword, mask=real, other=0.0)[None, :]
        similarity = tl.where(real[None, :], similarity, -INFINITY)
        value, position = tl.max(similarity, axis=1, return_indices=True)  # ties: the lowest
        better = value > best
        best = tl.where(better, value, best)
        nearest = tl.where(better, first + position, nearest)
    tl.store(out_ptr + token, nearest.to(tl.int64), mask=token < num_tokens)


def nearest_of_many(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    """hidden [T, D], codewords [G, D] float32 -> [T] int64, a block of tokens per program."""
    num_tokens, dim = hidden.shape
    num_codewords = codewords.shape[0]
    nearest = torch.empty(num_tokens, dtype=torch.int64, device=hidden.device)
    # |h - c|^2 = |h|^2 - 2 (<h, c> - |c|^2 / 2): the token's own norm changes no order.
    offsets = codewords.square().sum(-1).div_(2) if euclidean else None
    parts = 3 if hidden.dtype == torch.bfloat16 else 1
    words = bfloat16_parts(codewords) if parts > 1 else codewords.contiguous()
    config = _config(num_codewords, dim, parts)
    _nearest_kernel[(triton.cdiv(num_tokens, config.block_tokens),)](
        as_stored(hidden), words, offsets, nearest,
        num_tokens, num_codewords, dim, codewords.numel(),
        EUCLIDEAN=euclidean, PARTS=parts, BLOCK_T=config.block_tokens,
        BLOCK_G=config.block_codewords, BLOCK_D=config.block_dim,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
    )  # fmt: skip
    return nearest
