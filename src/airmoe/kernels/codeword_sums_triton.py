"""Sums of token directions by codeword in a fixed order: tiles of a codeword's tokens, then those.

Two steps, because early in training one codeword may have most of the tokens.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import operator
from airmoe.kernels.cells import row_tiles, sort_by_cell

TILE_ROWS = 64


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
            tokens = tl.load(order + rows, mask=used, other=0).to(tl.int64)
            states = tl.load(
                hidden + tokens[:, None] * DIM + columns[None, :],
                mask=used[:, None] & column_mask[None, :],
                other=0.0,
            ).to(tl.float32)
            if SPHERICAL:  # in two steps, so that no square overflows or vanishes
                largest = tl.max(tl.abs(states), axis=1)
                states = states / tl.where(largest > 0, largest, 1.0)[:, None]
                norm = tl.sqrt_rn(tl.sum(states * states, axis=1))
                states = states / tl.where(norm > 0, norm, 1.0)[:, None]
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
        total += tl.load(
            sums + tiles.to(tl.int64)[:, None] * DIM + columns[None, :],
            mask=used[:, None] & column_mask[None, :],
            other=0.0,
        )
        count += tl.load(counts + tiles, mask=used, other=0.0)
    row = out + cell.to(tl.int64) * (DIM + 1)
    tl.store(row + columns, tl.sum(total, axis=0), mask=column_mask)
    tl.store(row + DIM, tl.sum(count, axis=0))


@operator("airmoe::codeword_sums")
def codeword_sums_op(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, spherical: bool
) -> Tensor:
    """hidden [T, D], valid and codeword_ids [T] -> [G, D + 1] float32."""
    hidden = hidden.contiguous()
    num_tokens, dim = hidden.shape
    out = torch.empty(num_codewords, dim + 1, dtype=torch.float32, device=hidden.device)
    _, order, offsets = sort_by_cell(codeword_ids, num_codewords)
    tiles = row_tiles(offsets, num_tokens, TILE_ROWS)
    sums = torch.empty(tiles.count, dim, dtype=torch.float32, device=hidden.device)
    counts = torch.empty(tiles.count, dtype=torch.float32, device=hidden.device)
    width = triton.next_power_of_2(dim)
    if tiles.count:
        _tile_sums_kernel[(tiles.count,)](
            hidden, valid, tiles.cells, tiles.rows, order, sums, counts,
            DIM=dim, WIDTH=width, TILE=TILE_ROWS, ROWS=max(1, min(16, 4096 // width)),
            SPHERICAL=spherical, num_warps=4,
        )  # fmt: skip
    _cell_sums_kernel[(num_codewords,)](
        sums, counts, tiles.starts, out,
        DIM=dim, WIDTH=width, ROWS=max(1, min(4, 4096 // width)), num_warps=4,
    )  # fmt: skip
    return out


@codeword_sums_op.register_fake
def _(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, spherical: bool
) -> Tensor:
    return hidden.new_empty(num_codewords, hidden.shape[1] + 1, dtype=torch.float32)
