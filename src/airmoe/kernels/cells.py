"""Cells: rows sorted by cell, the layout in which shared pools become dense products."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import operator, use_triton, with_kernel

SMALL_MEAN_ROWS = 32  # up to this mean number of rows, a cell leaves experts of its pool unused
MANY_ROWS = 32_768  # with more rows, or as many, matrices [N, M] take much memory
FEW_ROWS = 64  # up to so many, one kernel sorts them and lays them out
MANY_KEYS = 2048  # a GPU sorts fewer in a single program, so casting them first saves nothing


@dataclass(frozen=True)
class ReverseIndex:
    """Where each expert of a table occurs in the pools [G, M]."""

    entries: Tensor  # [G * M] int32: cell * M + position, expert by expert, cells ascending
    starts: Tensor  # [E + 1] int32: first entry of each expert

    def sum_by_expert(self, values: Tensor) -> Tensor:
        """Add up what an expert has in all its cells: [G, M] -> [E], in a fixed order."""
        return sum_by_expert(values, self.entries, self.starts)


@with_kernel("cells_triton")
def sum_by_expert(values: Tensor, entries: Tensor, starts: Tensor) -> Tensor:
    """The sums of an index, given by its parts."""
    wide = torch.float64 if values.is_floating_point() else torch.int64
    ordered = values.flatten()[entries].to(wide).cumsum(0)
    return F.pad(ordered, (1, 0))[starts].diff().to(values.dtype)


def make_reverse(pools: Tensor, num_experts: int) -> ReverseIndex:
    """pools [G, M], no expert twice in a row -> where each expert is."""
    if pools.numel() >= 2**31:
        raise ConfigError(
            "cells.pools",
            tuple(pools.shape),
            "must have fewer than 2**31 entries, which are numbered in 32 bits",
            "Use fewer codewords or shorter shortlists.",
        )
    if num_experts <= 2**16:  # a GPU's radix sort takes one pass per byte of the keys
        keys, entries = (pools.flatten() - 2**15).to(torch.int16).sort(stable=True)
        ordered = keys.int() + 2**15
    else:
        ordered, entries = pools.flatten().int().sort(stable=True)
    experts = torch.arange(num_experts + 1, device=pools.device, dtype=torch.int32)
    starts = torch.searchsorted(ordered, experts, out_int32=True)
    return ReverseIndex(entries.int(), starts)


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
    def pool_width(self) -> int:
        """M, or the number of their neurons."""
        return self.pools.shape[1]

    def reverse_index(self, num_experts: int) -> ReverseIndex:
        return self.reverse or make_reverse(self.pools, num_experts)


@dataclass(frozen=True)
class Cells:
    """Rows grouped by cell, and the pool of experts each cell's rows share."""

    token_ids: Tensor  # [N] token of each row, rows sorted by cell
    offsets: Tensor  # [G + 1] first row of each cell; stays on the device
    pools: Tensor  # [G, M] expert ids, ascending
    order: Tensor  # [N] row -> its place in the unsorted [T * rows_per_token] list
    rows_per_token: int
    pools_version: int | None  # of the pools when the rows were sorted; None: not known
    cell_of_row: Tensor  # [N]
    # At most one of each, made when a kernel first asks for it.
    _tiles: list[RowTiles] = field(default_factory=list, repr=False, compare=False)
    _reverse: list[ReverseIndex] = field(default_factory=list, repr=False, compare=False)

    @property
    def small(self) -> bool:
        """True where the mean cell has so few rows that they leave some of its experts unused."""
        return self.token_ids.shape[0] <= SMALL_MEAN_ROWS * self.pools.shape[0]

    def layout(self, num_experts: int | None = None) -> CellLayout:
        """What kernels read, with the reverse index where the number of experts is given."""
        from airmoe.kernels.cells_triton import row_tiles

        if not self._tiles:
            self._tiles.append(row_tiles(self.offsets, self.token_ids.shape[0]))
        reverse = None if num_experts is None else self.reverse_index(num_experts)
        return CellLayout(self._tiles[0], self.offsets, self.token_ids, self.pools, reverse)

    def reverse_index(self, num_experts: int) -> ReverseIndex:
        """Where each expert is in the pools."""
        if not self._reverse:
            self._reverse.append(make_reverse(self.pools, num_experts))
        return self._reverse[0]

    @functools.cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(cell, its first row, the row after its last) for each cell that has rows.

        The host waits for the device: for plain PyTorch only.
        """
        spans, start = [], 0
        for cell, size in Counter(self.cell_of_row.tolist()).items():  # ascending, as rows are
            spans.append((cell, start, start + size))
            start += size
        return spans

    def check_current(self) -> None:
        """Pools are a cache, rewritten in place: an old routing must not read the new lists."""
        if torch.compiler.is_compiling():
            return  # pools of a compiled graph are its own, and versions mean nothing in it
        if self.pools_version not in (None, version_of(self.pools)):
            raise RuntimeError(
                "This routing is stale: its router has rebuilt the shortlists. "
                "Read ids, counts and probabilities before the next step, or route again."
            )


def make_cells(cell_ids: Tensor, pools: Tensor, reverse: ReverseIndex | None = None) -> Cells:
    """cell_ids [T, R] (R cells per token), pools [G, M] -> the sorted layout, N = T * R.

    `reverse` is the reverse index of these pools, if the caller has it.
    """
    rows_per_token, num_cells = cell_ids.shape[1], pools.shape[0]
    ids, tiles = cell_ids.flatten(), []
    if 0 < ids.shape[0] <= FEW_ROWS and use_triton(ids):
        row_cells, order, offsets, *parts = layout_of_few(ids, num_cells)
        tiles = [RowTiles(*parts)]
    else:
        row_cells, order, offsets = sort_by_cell(ids, num_cells)
    token_ids = order if rows_per_token == 1 else order.div(rows_per_token, rounding_mode="floor")
    return Cells(
        token_ids=token_ids,
        offsets=offsets,
        pools=pools,
        order=order,
        rows_per_token=rows_per_token,
        pools_version=version_of(pools),
        cell_of_row=row_cells,
        _tiles=tiles,
        _reverse=[] if reverse is None else [reverse],
    )


def sort_by_cell(cell_ids: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """cell_ids [N] -> the same sorted, the places they had (equal ones in order), and the first row
    of each cell [G + 1]."""
    if cell_ids.shape[0] >= MANY_KEYS and num_cells <= 2**15:
        # A GPU's radix sort takes one pass per byte of the keys.
        narrow, order = cell_ids.to(torch.int16).sort(stable=True)
        row_cells = narrow.to(cell_ids.dtype)
    else:
        row_cells, order = cell_ids.sort(stable=True)
    return row_cells, order, cell_offsets(row_cells, num_cells)


@with_kernel("cells_triton")
def cell_offsets(ordered: Tensor, num_cells: int) -> Tensor:
    """Sorted cell ids [N] -> the first row of each cell: [G + 1]."""
    return torch.searchsorted(ordered, torch.arange(num_cells + 1, device=ordered.device))


def version_of(tensor: Tensor) -> int | None:
    """Moves with every change in place; None where that is not known."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version


def empty_layout(ids: Tensor, num_cells: int) -> tuple[Tensor, ...]:
    from airmoe.kernels.cells_triton import block_rows, empty_tiles

    num_rows = ids.shape[0]
    offsets = ids.new_empty(num_cells + 1, dtype=torch.int64)
    order = torch.empty_like(ids, dtype=torch.int64)
    tiles = empty_tiles(offsets, num_rows, block_rows(num_rows, num_cells))
    return torch.empty_like(ids), order, offsets, *tiles


# What `sort_by_cell` gives, and the parts of `RowTiles`; for up to `FEW_ROWS`. Only with Triton.
layout_of_few = operator(
    "layout_of_few(Tensor cell_ids, SymInt num_cells) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "cells_triton",
    fake=empty_layout,
)

# How many rows of each cell chose each of its experts: [G, M] int32. Only with Triton.
counts_per_entry = operator(
    "counts_per_entry(Tensor gates, Tensor[] layout) -> Tensor",
    "cells_triton",
    fake=lambda gates, layout: gates.new_empty(
        CellLayout.of(layout).pools.shape, dtype=torch.int32
    ),
)


# Helpers of the plain-PyTorch kernels.


def read_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids]: on a CPU by bags of one row each.

    embedding_bag asks for rows ahead of time, which `index_select` does not: half the time. Float64
    is not among what it is fast for.
    """
    if table.device.type != "cpu" or table.dtype == torch.float64:
        return table.index_select(0, ids)
    return torch.embedding_bag(table, ids, torch.arange(ids.shape[0], device=ids.device))[0]


class RowAdder:
    """Sums left.T @ right into rows of a gradient, in float32 or wider whatever the table is.

    Products go through one buffer, because on a CPU fresh memory costs more than writing to it.
    """

    def __init__(self, table: Tensor, num_rows: int, work: torch.dtype) -> None:
        self.total = torch.zeros(
            table.shape, dtype=torch.promote_types(table.dtype, torch.float32), device=table.device
        )
        self.buffer = torch.empty(num_rows, table.shape[1], dtype=work, device=table.device)

    def add(self, ids: Tensor, left: Tensor, right: Tensor) -> None:
        """left [n, num_rows], right [n, D] -> added to rows ids [num_rows], each id once."""
        torch.mm(left.T, right, out=self.buffer)
        self.total.index_add_(0, ids, self.buffer.to(self.total.dtype))
