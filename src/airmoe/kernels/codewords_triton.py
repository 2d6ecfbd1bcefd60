"""Codewords on a GPU: the nearest of each token, and the sums of each one's tokens.

The nearest without a [T, G] matrix: every tile of the product goes into a running best. Products
are as exact as float32, which is the exact sum of three bfloat16 numbers: against bfloat16 tokens
three bfloat16 products of the tensor cores do it; against others it is made of three tf32 ones.

Many tokens: a program takes a block of tokens and walks all codewords. A few tokens (decoding): a
program takes a few codewords, reads them once and leaves their best for each token; a second
kernel compares those. Each warp multiplies its own slice of the depth, so that even eight codewords
keep all warps of a program busy, and their partial products are added at the end.

Sums have a fixed order: tiles of a codeword's tokens, then those of its tiles. Two steps, because
early in training one codeword may have most of the tokens.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cells import sort_by_cell
from airmoe.kernels.cells_triton import row_tiles
from airmoe.kernels.device_triton import (
    INFINITY,
    as_stored,
    bfloat16_parts,
    block_size,
    count_below,
    load_rows,
    upper_half,
)
from airmoe.kernels.token_experts import SMALL_BATCH

ENOUGH_PROGRAMS = 132
FEWEST_WORDS, MOST_WORDS = 8, 16  # of one program: the more, the fewer programs read the tokens
NUM_SLICES = 8  # of the depth, one per warp
COMPARE_BLOCK = 1024  # candidates of one token looked at together
TILE_ROWS = 64  # tokens of one codeword added up together
MOST = tl.constexpr(2**31 - 1)  # above every id


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
    PARTS: tl.constexpr,
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
        if offsets_ptr is not None:
            similarity -= tl.load(offsets_ptr + codeword, mask=real, other=0.0)[None, :]
        similarity = tl.where(real[None, :], similarity, -INFINITY)
        value, position = tl.max(similarity, axis=1, return_indices=True)  # ties: the lowest
        better = value > best
        best = tl.where(better, value, best)
        nearest = tl.where(better, first + position, nearest)
    tl.store(out_ptr + token, nearest.to(tl.int64), mask=token < num_tokens)


def _nearest_of_many(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    """hidden [T, D], codewords [G, D] float32 -> [T] int64, a block of tokens per program."""
    num_tokens, dim = hidden.shape
    num_codewords = codewords.shape[0]
    nearest = torch.empty(num_tokens, dtype=torch.int64, device=hidden.device)
    # |h - c|^2 = |h|^2 - 2 (<h, c> - |c|^2 / 2): the token's own norm changes no order.
    offsets = codewords.square().sum(-1).div_(2) if euclidean else None
    parts = 3 if hidden.dtype == torch.bfloat16 else 1
    words = bfloat16_parts(codewords) if parts > 1 else codewords.contiguous()
    config = {
        "BLOCK_T": 128,
        "BLOCK_G": block_size(num_codewords, 128),
        "BLOCK_D": block_size(dim, 32),
        "num_warps": 8,
        "num_stages": 3,
        # Two programs share an SM, one multiplying, one comparing.
        "maxnreg": 128 if parts > 1 else None,
    }
    _nearest_kernel[(triton.cdiv(num_tokens, config["BLOCK_T"]),)](
        as_stored(hidden), words, offsets, nearest,
        num_tokens, num_codewords, dim, codewords.numel(), PARTS=parts, **config,
    )  # fmt: skip
    return nearest


def _few_config(num_tokens: int, num_codewords: int, in_parts: bool) -> dict[str, Any]:
    tokens = max(16, triton.next_power_of_2(num_tokens))
    many = triton.cdiv(num_codewords, MOST_WORDS) >= ENOUGH_PROGRAMS
    return {
        "BLOCK_T": tokens,
        "BLOCK_G": MOST_WORDS if many else FEWEST_WORDS,
        # Of one slice; float32 tokens take twice the registers.
        "BLOCK_D": 32 if in_parts or tokens < 64 else 16,
        "num_stages": 4 if tokens == 16 else 3,  # as many as shared memory has beside the tokens
    }


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


def _nearest_of_few(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    """hidden [T, D], codewords [G, D] float32 -> [T] int64, in two kernels."""
    num_tokens, dim = hidden.shape
    num_codewords, device = codewords.shape[0], hidden.device
    in_parts = hidden.dtype == torch.bfloat16
    config = _few_config(num_tokens, num_codewords, in_parts)
    programs = triton.cdiv(num_codewords, config["BLOCK_G"])
    best = torch.empty(num_tokens, programs, dtype=torch.float32, device=device)
    ids = torch.empty(num_tokens, programs, dtype=torch.int32, device=device)
    _best_of_words_kernel[(programs,)](
        as_stored(hidden), codewords.contiguous(), best, ids, num_tokens, num_codewords, dim,
        EUCLIDEAN=euclidean, IN_PARTS=in_parts, SLICES=NUM_SLICES, num_warps=NUM_SLICES, **config,
    )  # fmt: skip
    nearest = torch.empty(num_tokens, dtype=torch.int64, device=device)
    block = min(triton.next_power_of_2(programs), COMPARE_BLOCK)
    _best_of_best_kernel[(num_tokens,)](
        best, ids, nearest, programs, BLOCK=block, num_warps=max(1, block // 256)
    )
    return nearest


def assign(hidden: Tensor, codewords: Tensor, *, euclidean: bool) -> Tensor:
    """hidden [T, D], codewords [G, D] float32 -> [T] int64, ties to the lowest id."""
    if hidden.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=hidden.device)
    nearest = _nearest_of_few if hidden.shape[0] <= SMALL_BATCH else _nearest_of_many
    return nearest(hidden, codewords, euclidean)


@triton.jit
def _directions(states, AXIS: tl.constexpr):
    """Rows (AXIS 1), or one (0), on the unit sphere: in two steps, so that no square overflows or
    vanishes."""
    largest = tl.max(tl.abs(states), axis=AXIS)
    largest = tl.where(largest > 0, largest, 1.0)
    states = states / (largest[:, None] if AXIS == 1 else largest)
    norm = tl.sqrt_rn(tl.sum(states * states, axis=AXIS))
    norm = tl.where(norm > 0, norm, 1.0)
    return states / (norm[:, None] if AXIS == 1 else norm)


@triton.jit
def _tile_sums_kernel(
    hidden, valid, tile_cells, tile_rows, order, sums, counts,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    SPHERICAL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tl.load(tile_cells + tile) >= 0:
        columns = tl.arange(0, WIDTH)
        column_mask = columns < DIM
        total = tl.zeros((WIDTH,), tl.float32)
        count = tl.zeros((ROWS,), tl.float32)
        for start in range(0, TILE, ROWS):
            rows = tl.load(tile_rows + tile * TILE + start + tl.arange(0, ROWS))
            used = rows >= 0
            tokens = tl.load(order + rows, mask=used, other=0)
            states = load_rows(hidden, tokens, used, columns, DIM).to(tl.float32)
            if SPHERICAL:
                states = _directions(states, 1)
            total += tl.sum(states, axis=0)
            count += tl.load(valid + tokens, mask=used, other=0).to(tl.float32)
        tl.store(sums + tile.to(tl.int64) * DIM + columns, total, mask=column_mask)
        tl.store(counts + tile, tl.sum(count, axis=0))


@triton.jit
def _cell_sums_kernel(
    sums, counts, tile_starts, out, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    cell = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    column_mask = columns < DIM
    first = tl.load(tile_starts + cell)
    last = tl.load(tile_starts + cell + 1)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    count = tl.zeros((ROWS,), tl.float32)
    for start in range(first, last, ROWS):
        tiles = start + tl.arange(0, ROWS)
        used = tiles < last
        total += load_rows(sums, tiles, used, columns, DIM)
        count += tl.load(counts + tiles, mask=used, other=0.0)
    row = out + cell.to(tl.int64) * (DIM + 1)
    tl.store(row + columns, tl.sum(total, axis=0), mask=column_mask)
    tl.store(row + DIM, tl.sum(count, axis=0))


def codeword_sums(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, *, spherical: bool
) -> Tensor:
    """hidden [T, D], valid and codeword_ids [T] -> [G, D + 1] float32."""
    num_tokens, dim = hidden.shape
    out = torch.empty(num_codewords, dim + 1, dtype=torch.float32, device=hidden.device)
    _, order, offsets = sort_by_cell(codeword_ids, num_codewords)
    tiles = row_tiles(offsets, num_tokens, TILE_ROWS)
    sums = torch.empty(tiles.count, dim, dtype=torch.float32, device=hidden.device)
    counts = torch.empty(tiles.count, dtype=torch.float32, device=hidden.device)
    width = triton.next_power_of_2(dim)
    _tile_sums_kernel[(tiles.count,)](
        hidden.contiguous(), valid, tiles.cells, tiles.rows, order, sums, counts,
        DIM=dim, WIDTH=width, TILE=TILE_ROWS, ROWS=max(1, min(16, 4096 // width)),
        SPHERICAL=spherical, num_warps=4,
    )  # fmt: skip
    _cell_sums_kernel[(num_codewords,)](
        sums, counts, tiles.starts, out,
        DIM=dim, WIDTH=width, ROWS=max(1, min(4, 4096 // width)), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _draw_kernel(
    hidden, seen, keys, total, first, out, num_keys, num_tokens, steps,
    STRATA: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPHERICAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    column_mask = columns < DIM
    begin, end = row * 0, tl.load(total)
    if STRATA:
        begin, end = row * end // num_keys, (row + 1) * end // num_keys
    draw = (tl.load(keys + row) & 0x7FFFFFFFFFFFFFFF) >> 1
    number = begin + draw % tl.maximum(end - begin, 1) - tl.load(first)
    place = tl.max(
        count_below(seen, num_tokens, number + 1 + tl.zeros((1,), tl.int64), steps), axis=0
    )
    mine = (number >= 0) & (place < num_tokens)
    at = hidden + place.to(tl.int64) * DIM + columns
    states = tl.load(at, mask=column_mask & mine, other=0.0).to(tl.float32)
    if SPHERICAL:
        states = _directions(states, 0)
    tl.store(out + row * DIM + columns, states, mask=column_mask)


def drawn_tokens(
    hidden: Tensor, valid: Tensor, keys: Tensor, total: Tensor, first: Tensor, **form: bool
) -> Tensor:
    """A token for each key: [n, D] float32."""
    (num_tokens, dim), num_keys = hidden.shape, keys.shape[0]
    out = torch.empty(num_keys, dim, dtype=torch.float32, device=hidden.device)
    width = triton.next_power_of_2(dim)
    _draw_kernel[(num_keys,)](
        hidden.contiguous(), valid.cumsum(0), keys.contiguous(), total, first, out, num_keys,
        num_tokens, num_tokens.bit_length(), STRATA=form["strata"], SPHERICAL=form["spherical"],
        DIM=dim, WIDTH=width, num_warps=max(1, min(8, width // 256)),
    )  # fmt: skip
    return out


@triton.jit
def _move_kernel(
    codewords, counts, sums, totals, num_tokens, decay, rest, dead_below,
    DIM: tl.constexpr, WIDTH: tl.constexpr, EUCLIDEAN: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = columns < DIM
    place = cell * DIM + columns
    count = tl.load(counts + cell)
    total = tl.load(sums + place, mask=mask, other=0.0)
    moved = tl.load(codewords + place, mask=mask, other=0.0)
    if tl.load(num_tokens) > 0:
        row = totals + cell * (2 * DIM + 1)
        count = count * decay + tl.load(row + DIM) * rest
        total = total * decay + tl.load(row + columns, mask=mask, other=0.0) * rest
        if count < dead_below:
            count = 1.0
            total = tl.load(row + DIM + 1 + columns, mask=mask, other=0.0)
        if EUCLIDEAN:
            if count != 0:
                moved = tl.div_rn(total, count + tl.zeros_like(total))
        elif tl.max(tl.abs(total), axis=0) > 0:
            moved = _directions(total, 0)
    tl.debug_barrier()  # all threads have read what is overwritten
    tl.store(counts + cell, count)
    tl.store(sums + place, total, mask=mask)
    tl.store(codewords + place, moved, mask=mask)


def move_codewords(
    codewords: Tensor, counts: Tensor, sums: Tensor, totals: Tensor, num_tokens: Tensor, *form: Any
) -> None:
    """`codewords.move`; codewords, counts and sums are contiguous."""
    (num_codewords, dim), (decay, dead_below, euclidean) = codewords.shape, form
    width = triton.next_power_of_2(dim)
    _move_kernel[(num_codewords,)](
        codewords, counts, sums, totals, num_tokens, decay, 1 - decay, dead_below,
        DIM=dim, WIDTH=width, EUCLIDEAN=euclidean, num_warps=max(1, min(8, width // 256)),
    )  # fmt: skip
