"""How cells are laid out for kernels: blocks of rows, and where each expert is in the pools.

A cell has any number of rows, so how many blocks there are is known on the device only. Their list
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
class CellLayout:
    """What a kernel reads of cells. Operators take it as one list of tensors."""

    tiles: RowTiles
    offsets: Tensor  # [G + 1] first row of each cell
    token_ids: Tensor  # [N] token of each row
    pools: Tensor  # [G, M] rows of the tables
    reverse: ReverseIndex | None = None

    def tensors(self) -> list[Tensor]:
        tiles, reverse = self.tiles, self.reverse
        index = [] if reverse is None else [reverse.entries, reverse.starts]
        own = [self.offsets, self.token_ids, self.pools]
        return [tiles.cells, tiles.first_rows, tiles.rows, *own, *index]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> CellLayout:
        """From what `tensors` gave."""
        cells, first_rows, rows, offsets, token_ids, pools, *index = tensors
        tiles = RowTiles(cells, first_rows, rows)
        return cls(tiles, offsets, token_ids, pools, ReverseIndex(*index) if index else None)

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def pool(self) -> int:
        """M, or the neurons of so many experts."""
        return self.pools.shape[1]

    def reverse_index(self, num_experts: int) -> ReverseIndex:
        return self.reverse or make_reverse(self.pools, num_experts)


@dataclass(frozen=True)
class RowTiles:
    """Each tile is `block` consecutive rows of one cell, the last of a cell maybe fewer."""

    cells: Tensor  # [tiles] int32, -1 = no tile
    first_rows: Tensor  # [tiles] int32
    rows: Tensor  # [tiles, block] int32, -1 = no row
    starts: Tensor | None = None  # [G + 1] first tile of each cell

    @property
    def count(self) -> int:
        return self.rows.shape[0]

    @property
    def block(self) -> int:
        return self.rows.shape[1]


def row_tiles(offsets: Tensor, num_rows: int, block: int | None = None) -> RowTiles:
    """offsets [G + 1] of rows sorted by cell -> tiles, of a size that suits the mean cell.

    Where `block` is given, a power of two, tiles have that size.
    """
    num_cells = offsets.shape[0] - 1
    block = block_rows(num_rows, num_cells) if block is None else block
    if use_triton(offsets):
        from airmoe.kernels.layout_triton import row_tiles_op

        _check_size("rows", num_rows, most_tiles(num_rows, num_cells, block))
        _check_size("cells", num_cells, num_cells)
        return RowTiles(*row_tiles_op(offsets, num_rows, block))
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
        rows.int(),
        torch.nn.functional.pad(ends, (1, 0)),
    )


def _check_size(name: str, size: int, programs: int) -> None:
    if programs > MOST_PROGRAMS:
        raise ConfigError(
            f"cells.{name}",
            size,
            f"makes {programs} blocks, and a GPU takes at most {MOST_PROGRAMS} in one direction",
            "Use smaller micro-batches or fewer codewords, or AIRMOE_BACKEND=reference.",
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


@dataclass(frozen=True)
class ReverseIndex:
    """Where each expert of a table occurs in the pools [G, M]."""

    entries: Tensor  # [G * M] int32: cell * M + position, expert by expert, cells ascending
    starts: Tensor  # [E + 1] int32: first entry of each expert

    def sum_by_expert(self, values: Tensor) -> Tensor:
        """Add up what an expert has in all its cells: [G, M] -> [E], in a fixed order."""
        if use_triton(values):
            from airmoe.kernels.layout_triton import sum_by_expert_op

            return sum_by_expert_op(values, self.entries, self.starts)
        wide = torch.float64 if values.is_floating_point() else torch.int64
        ordered = values.flatten()[self.entries].to(wide).cumsum(0)
        ends = torch.nn.functional.pad(ordered, (1, 0))[self.starts]
        return ends.diff().to(values.dtype)


def make_reverse(pools: Tensor, num_experts: int) -> ReverseIndex:
    """pools [G, M], no expert twice in a row -> where each expert is."""
    if pools.numel() >= 2**31:
        raise ConfigError(
            "cells.pools",
            tuple(pools.shape),
            "must have fewer than 2**31 entries, which are numbered in 32 bits",
            "Use fewer codewords or shorter shortlists.",
        )
    if num_experts <= 2**16:  # a GPU takes a pass over all keys for every byte of one
        keys, entries = (pools.flatten() - 2**15).to(torch.int16).sort(stable=True)
        ordered = keys.int() + 2**15
    else:
        ordered, entries = pools.flatten().int().sort(stable=True)
    experts = torch.arange(num_experts + 1, device=pools.device, dtype=torch.int32)
    starts = torch.searchsorted(ordered, experts, out_int32=True)
    return ReverseIndex(entries.int(), starts)
