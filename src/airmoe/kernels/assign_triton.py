"""Nearest codeword without a [T, G] matrix: a product whose every tile goes into a running best.

Products are as exact as float32. A float32 number is the exact sum of three bfloat16 numbers, so
against bfloat16 tokens three bfloat16 products of the tensor cores do it; against other tokens the
float32 product is made of three tf32 ones.

Many tokens: a program takes a block of tokens and walks all codewords. A few tokens (decoding): a
program takes a few codewords, reads them once and leaves their best for each token; a second
kernel compares those. Each warp multiplies its own slice of the depth, so that even eight codewords
keep all warps of a program busy, and their partial products are added at the end.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import operator
from airmoe.kernels.device_triton import INFINITY, as_stored, bfloat16_parts, upper_half
from airmoe.kernels.token_experts import SMALL_BATCH

ENOUGH_PROGRAMS = 132
FEWEST_WORDS, MOST_WORDS = 8, 16  # of one program: the more, the fewer programs read the tokens
NUM_SLICES = 8  # of the depth, one per warp
COMPARE_BLOCK = 1024  # candidates of one token looked at together
MOST = tl.constexpr(2**31 - 1)  # above every id


@dataclass(frozen=True)
class _ManyConfig:
    block_tokens: int
    block_codewords: int
    block_dim: int
    num_warps: int
    num_stages: int
    max_registers: int | None  # 128 lets two programs share an SM, one multiplying, one comparing


def _many_config(num_codewords: int, dim: int, parts: int) -> _ManyConfig:
    codewords = min(128, max(16, triton.next_power_of_2(num_codewords)))
    depth = min(32, max(16, triton.next_power_of_2(dim)))
    return _ManyConfig(128, codewords, depth, 8, 3, 128 if parts > 1 else None)


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
    config = _many_config(num_codewords, dim, parts)
    _nearest_kernel[(triton.cdiv(num_tokens, config.block_tokens),)](
        as_stored(hidden), words, offsets, nearest,
        num_tokens, num_codewords, dim, codewords.numel(),
        EUCLIDEAN=euclidean, PARTS=parts, BLOCK_T=config.block_tokens,
        BLOCK_G=config.block_codewords, BLOCK_D=config.block_dim,
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
    )  # fmt: skip
    return nearest


@dataclass(frozen=True)
class _FewConfig:
    block_tokens: int
    block_codewords: int
    block_dim: int  # of one slice
    num_stages: int  # as many as fit into shared memory beside the tokens


def _few_config(num_tokens: int, num_codewords: int, in_parts: bool) -> _FewConfig:
    tokens = max(16, triton.next_power_of_2(num_tokens))
    many = triton.cdiv(num_codewords, MOST_WORDS) >= ENOUGH_PROGRAMS
    words = MOST_WORDS if many else FEWEST_WORDS
    depth = 32 if in_parts or tokens < 64 else 16  # float32 tokens take twice the registers
    return _FewConfig(tokens, words, depth, 4 if tokens == 16 else 3)


@triton.jit
def _best_of_words_kernel(
    hidden_ptr, codewords_ptr, best_ptr, ids_ptr, num_tokens, num_codewords, dim,
    EUCLIDEAN: tl.constexpr, IN_PARTS: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_G
    token = tl.arange(0, BLOCK_T)
    codeword = first + tl.arange(0, BLOCK_G)
    real = codeword < num_codewords
    depth = tl.arange(0, SLICES)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    hidden_at = hidden_ptr + token[None, :, None] * dim + depth[:, None, :]
    words_at = codewords_ptr + codeword.to(tl.int64)[None, None, :] * dim + depth[:, :, None]
    products = tl.zeros((SLICES, BLOCK_T, BLOCK_G), dtype=tl.float32)
    squares = tl.zeros((SLICES, BLOCK_D, BLOCK_G), dtype=tl.float32)
    for start in range(0, dim, SLICES * BLOCK_D):
        inside = depth < dim - start
        token_mask = (token < num_tokens)[None, :, None] & inside[:, None, :]
        hidden = tl.load(hidden_at + start, mask=token_mask, other=0.0)
        word_mask = real[None, None, :] & inside[:, :, None]
        words = tl.load(words_at + start, mask=word_mask, other=0.0)
        if EUCLIDEAN:
            squares += words * words
        if IN_PARTS:
            for _ in tl.static_range(3):
                upper = upper_half(words)
                products = tl.dot(hidden, upper.to(hidden.dtype), products)
                words -= upper
        else:
            products = tl.dot(hidden.to(tl.float32), words, products, input_precision="tf32x3")
    similarity = tl.sum(products, axis=0)
    if EUCLIDEAN:
        similarity -= (tl.sum(tl.sum(squares, axis=0), axis=0) / 2)[None, :]
    # Comparisons with NaN would go either way: it counts as farthest.
    similarity = tl.where(real[None, :] & (similarity > -INFINITY), similarity, -INFINITY)
    best, position = tl.max(similarity, axis=1, return_indices=True)  # ties: the lowest
    place = token * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + place, best, mask=token < num_tokens)
    tl.store(ids_ptr + place, first + position, mask=token < num_tokens)


@triton.jit
def _best_of_best_kernel(best_ptr, ids_ptr, out_ptr, num_candidates, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    best = tl.full((BLOCK,), -INFINITY, dtype=tl.float32)
    nearest = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_candidates, BLOCK):
        candidate = start + tl.arange(0, BLOCK)
        place = token * num_candidates + candidate
        values = tl.load(best_ptr + place, mask=candidate < num_candidates, other=-INFINITY)
        better = values > best
        best = tl.where(better, values, best)
        nearest = tl.where(better, tl.load(ids_ptr + place, mask=better, other=0), nearest)
    ties = best == tl.max(best, axis=0)
    tl.store(out_ptr + token, tl.min(tl.where(ties, nearest, MOST), axis=0).to(tl.int64))


def nearest_of_few(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    """hidden [T, D], codewords [G, D] float32 -> [T] int64, in two kernels."""
    num_tokens, dim = hidden.shape
    num_codewords, device = codewords.shape[0], hidden.device
    in_parts = hidden.dtype == torch.bfloat16
    config = _few_config(num_tokens, num_codewords, in_parts)
    programs = triton.cdiv(num_codewords, config.block_codewords)
    best = torch.empty(num_tokens, programs, dtype=torch.float32, device=device)
    ids = torch.empty(num_tokens, programs, dtype=torch.int32, device=device)
    _best_of_words_kernel[(programs,)](
        as_stored(hidden), codewords.contiguous(), best, ids, num_tokens, num_codewords, dim,
        EUCLIDEAN=euclidean, IN_PARTS=in_parts, SLICES=NUM_SLICES, BLOCK_T=config.block_tokens,
        BLOCK_G=config.block_codewords, BLOCK_D=config.block_dim,
        num_warps=NUM_SLICES, num_stages=config.num_stages,
    )  # fmt: skip
    nearest = torch.empty(num_tokens, dtype=torch.int64, device=device)
    block = min(triton.next_power_of_2(programs), COMPARE_BLOCK)
    _best_of_best_kernel[(num_tokens,)](
        best, ids, nearest, programs, BLOCK=block, num_warps=max(1, block // 256)
    )
    return nearest


@operator("airmoe::nearest_codeword")
def nearest_codeword(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    """hidden [T, D], codewords [G, D] float32 -> [T] int64, ties to the lowest id."""
    num_tokens = hidden.shape[0]
    if num_tokens == 0:
        return torch.empty(0, dtype=torch.int64, device=hidden.device)
    nearest = nearest_of_few if num_tokens <= SMALL_BATCH else nearest_of_many
    return nearest(hidden, codewords, euclidean)


@nearest_codeword.register_fake
def _(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=torch.int64)
