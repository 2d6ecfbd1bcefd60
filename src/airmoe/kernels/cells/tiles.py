"""Blocks of rows that lie in one cell: the work list of the Triton kernels.

A cell has any number of rows, so how many blocks there are is known on the device only. The list
has room for the most there can be, and what is left over is marked: nothing is read by the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import use_triton

MOST_PROGRAMS = 65_535  # of a grid's second and third direction
SMALLEST, LARGEST = 32, 64  # smaller ones read the pools too often, larger ones spill registers


@dataclass(frozen=True)
class RowTiles:
    """Each tile is `block` consecutive rows of one cell, the last of a cell maybe fewer."""

    cells: Tensor  # [tiles] int32, -1 = no tile
    first_rows: Tensor  # [tiles] int32
    rows: Tensor  # [tiles * block] int32, -1 = no row
    block: int
    starts: Tensor | None = None  # [G + 1] first tile of each cell

    @property
    def count(self) -> int:
        return self.cells.shape[0]


def row_tiles(offsets: Tensor, num_rows: int, block: int | None = None) -> RowTiles:
    """offsets [G + 1] of rows sorted by cell -> tiles, of a size that suits the mean cell.

    Where `block` is given, a power of two, tiles have that size.
    """
    if use_triton(offsets):
        from airmoe.kernels.cells.layout_triton import row_tiles_op

        num_cells = offsets.shape[0] - 1
        block = block_rows(num_rows, num_cells) if block is None else block
        _check_size("rows", num_rows, most_tiles(num_rows, num_cells, block))
        _check_size("cells", num_cells, num_cells)
        cells, first_rows, rows, starts = row_tiles_op(offsets, num_rows, block)
        return RowTiles(cells, first_rows, rows, block, starts)
    return make_tiles(offsets, num_rows, block)


def _check_size(name: str, size: int, programs: int) -> None:
    if programs > MOST_PROGRAMS:
        raise ConfigError(
            f"cells.{name}",
            size,
            f"makes {programs} blocks, and a GPU takes at most {MOST_PROGRAMS} in one direction",
            "Use smaller micro-batches or fewer codewords, or AIRMOE_BACKEND=reference.",
        )


def make_tiles(offsets: Tensor, num_rows: int, block: int | None = None) -> RowTiles:
    """The definition of `row_tiles`, in plain PyTorch."""
    num_cells = offsets.shape[0] - 1
    block = block_rows(num_rows, num_cells) if block is None else block
    sizes = offsets.diff()
    tiles = (sizes + (block - 1)).div(block, rounding_mode="floor")  # [G]
    ends = tiles.cumsum(0)
    places = torch.arange(most_tiles(num_rows, num_cells, block), device=offsets.device)
    cells = torch.searchsorted(ends, places, right=True)
    own = cells.clamp_max(num_cells - 1)
    first = offsets[own] + (places - (ends - tiles)[own]) * block
    used = cells < num_cells
    rows = first.unsqueeze(-1) + torch.arange(block, device=offsets.device)
    rows = torch.where(used.unsqueeze(-1) & (rows < offsets[own + 1].unsqueeze(-1)), rows, -1)
    return RowTiles(
        torch.where(used, cells, -1).int(),
        first.int(),
        rows.flatten().int(),
        block,
        torch.nn.functional.pad(ends, (1, 0)),
    )


def block_rows(num_rows: int, num_cells: int) -> int:
    """The power of two next above the mean cell, within what the kernels take.

    By comparisons, so that a compiler with unknown sizes tells three cases apart, not every number.
    """
    block = SMALLEST
    while block < LARGEST and num_rows >= (block + 1) * num_cells:
        block *= 2
    return block


def most_tiles(num_rows: int, num_cells: int, block: int) -> int:
    """Full tiles, and one that is not full in every cell that has rows."""
    return num_rows // block + min(num_rows, num_cells)
