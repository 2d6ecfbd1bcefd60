"""Where cells and their tiles begin, in three small kernels: a decoding step waits for each.

    offsets   first row of each cell      one binary search per cell in the sorted cell ids
    starts    first tile of each cell     a cumulative sum
    tiles     cell and rows of each tile  one binary search per tile in the starts

`reference.find_offsets` and `tiles.make_tiles` are the definitions; integers, so equal to the bit.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cells.tiles import most_tiles
from airmoe.kernels.operators import operator

SEARCH_BLOCK = 32  # one warp: searches wait for memory, so they are spread over the device
SUM_BLOCK = 1024
TILE_BLOCK = 16

# Lengths change from batch to batch: none of them is worth a compilation of its own.
LENGTHS = ["num_rows", "num_cells", "num_tiles", "steps"]


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


@triton.jit(do_not_specialize=LENGTHS)
def _offsets_kernel(ordered, offsets, num_rows, num_cells, steps, BLOCK: tl.constexpr):
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_rows = count_below(ordered, num_rows, cells, steps)
    tl.store(offsets + cells, first_rows.to(tl.int64), mask=cells <= num_cells)


@triton.jit
def _tiles_of(cells, offsets, num_cells, ROWS: tl.constexpr):
    """How many tiles each of these cells has, 0 past the last cell."""
    real = cells < num_cells
    first = tl.load(offsets + cells, mask=real, other=0)
    end = tl.load(offsets + cells + 1, mask=real, other=0)
    return ((end - first).to(tl.int32) + ROWS - 1) // ROWS


@triton.jit(do_not_specialize=LENGTHS)
def _starts_kernel(offsets, starts, num_cells, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    own = tl.program_id(0) * BLOCK
    lanes = tl.arange(0, BLOCK)
    # Each program adds up what lies before its cells: cheaper than to wait for the one before it.
    before = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, own, BLOCK):
        before += _tiles_of(block + lanes, offsets, num_cells, ROWS)
    ends = tl.sum(before, axis=0) + tl.cumsum(_tiles_of(own + lanes, offsets, num_cells, ROWS))
    tl.store(starts + 1 + own + lanes, ends.to(tl.int64), mask=own + lanes < num_cells)
    if own == 0:
        tl.store(starts, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=LENGTHS)
def _tiles_kernel(
    offsets, starts, tile_cells, tile_first, tile_rows, num_tiles, num_cells, steps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tiles < num_tiles
    cells = count_below(starts + 1, num_cells, tiles + 1, steps)  # cells that end before the tile
    used = cells < num_cells
    own = tl.minimum(cells, num_cells - 1)
    first = (tl.load(offsets + own) + (tiles - tl.load(starts + own)) * ROWS).to(tl.int32)
    end = tl.load(offsets + own + 1).to(tl.int32)
    tl.store(tile_cells + tiles, tl.where(used, cells, -1), mask=mask)
    tl.store(tile_first + tiles, first, mask=mask)
    lanes = tl.arange(0, ROWS)
    rows = first[:, None] + lanes[None, :]
    rows = tl.where(used[:, None] & (rows < end[:, None]), rows, -1)
    places = tiles.to(tl.int64)[:, None] * ROWS + lanes[None, :]
    tl.store(tile_rows + places, rows, mask=mask[:, None])


@operator("airmoe::cell_offsets")
def cell_offsets_op(ordered: Tensor, num_cells: int) -> Tensor:
    """Sorted cell ids [N] -> the first row of each cell: [G + 1] int64."""
    num_rows = ordered.shape[0]
    offsets = torch.empty(num_cells + 1, dtype=torch.int64, device=ordered.device)
    _offsets_kernel[(triton.cdiv(num_cells + 1, SEARCH_BLOCK),)](
        ordered.contiguous(), offsets, num_rows, num_cells, num_rows.bit_length(),
        BLOCK=SEARCH_BLOCK, num_warps=1,
    )  # fmt: skip
    return offsets


@cell_offsets_op.register_fake
def _(ordered: Tensor, num_cells: int) -> Tensor:
    return ordered.new_empty(num_cells + 1, dtype=torch.int64)


@operator("airmoe::row_tiles")
def row_tiles_op(
    offsets: Tensor, num_rows: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """offsets [G + 1], block a power of two -> cells, first rows, rows and starts of `RowTiles`."""
    offsets = offsets.contiguous()
    num_cells = offsets.shape[0] - 1
    starts = torch.empty_like(offsets)
    _starts_kernel[(triton.cdiv(num_cells, SUM_BLOCK),)](
        offsets, starts, num_cells, ROWS=block, BLOCK=SUM_BLOCK, num_warps=8
    )
    num_tiles = most_tiles(num_rows, num_cells, block)
    cells, first_rows, rows = (
        torch.empty(size, dtype=torch.int32, device=offsets.device)
        for size in (num_tiles, num_tiles, num_tiles * block)
    )
    if num_tiles:
        _tiles_kernel[(triton.cdiv(num_tiles, TILE_BLOCK),)](
            offsets, starts, cells, first_rows, rows, num_tiles, num_cells, num_cells.bit_length(),
            ROWS=block, BLOCK=TILE_BLOCK, num_warps=4,
        )  # fmt: skip
    return cells, first_rows, rows, starts


@row_tiles_op.register_fake
def _(offsets: Tensor, num_rows: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tiles = most_tiles(num_rows, offsets.shape[0] - 1, block)
    cells, first_rows, rows = (
        offsets.new_empty(size, dtype=torch.int32)
        for size in (num_tiles, num_tiles, num_tiles * block)
    )
    return cells, first_rows, rows, torch.empty_like(offsets)
