"""Cells: rows sorted by cell, the layout in which shared pools become dense products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.layout import CellLayout, ReverseIndex, RowTiles, make_reverse, row_tiles

FEW_ROWS = 32  # in the mean cell: then some experts of a pool are chosen by none of its rows
MANY_KEYS = 2048  # fewer are sorted by one program


@dataclass(frozen=True)
class Cells:
    """Rows grouped by cell, and the pool of experts each cell's rows share."""

    token_ids: Tensor  # [N] token of each row, rows sorted by cell
    offsets: Tensor  # [G + 1] first row of each cell; stays on the device
    pools: Tensor  # [G, M] expert ids, ascending
    order: Tensor  # [N] row -> its place in the unsorted [T * rows_per_token] list
    rows_per_token: int
    pools_version: int | None  # of the pools when the rows were sorted; None: not known
    row_cells: Tensor | None = None  # [N] cell of each row, where sorting gave it
    # Made once, when a kernel asks for them.
    _tiles: list[RowTiles] = field(default_factory=list, repr=False, compare=False)
    _reverse: list[ReverseIndex] = field(default_factory=list, repr=False, compare=False)

    @property
    def small(self) -> bool:
        """True where the mean cell has so few rows that some of its experts are chosen by none."""
        return self.token_ids.shape[0] <= FEW_ROWS * self.pools.shape[0]

    def layout(self, num_experts: int | None = None) -> CellLayout:
        """What kernels read, with the reverse index where the number of experts is given."""
        if not self._tiles:
            self._tiles.append(row_tiles(self.offsets, self.token_ids.shape[0]))
        reverse = None if num_experts is None else self.reverse_index(num_experts)
        return CellLayout(self._tiles[0], self.offsets, self.token_ids, self.pools, reverse)

    def reverse_index(self, num_experts: int) -> ReverseIndex:
        """Where each expert is in the pools."""
        if not self._reverse:
            self._reverse.append(make_reverse(self.pools, num_experts))
        return self._reverse[0]

    def check_current(self) -> None:
        """Pools are a cache that is rewritten in place: an old routing must not be read by it."""
        if torch.compiler.is_compiling():
            return  # pools of a compiled graph are its own, and versions mean nothing in it
        if self.pools_version not in (None, _version(self.pools)):
            raise RuntimeError(
                "This routing is of an earlier moment: its router has rebuilt the shortlists. "
                "Read ids, counts and probabilities before the next step, or route again."
            )

    def cell_of_row(self) -> Tensor:
        """[N] the cell each row belongs to."""
        if self.row_cells is not None:
            return self.row_cells
        rows = torch.arange(self.token_ids.shape[0], device=self.offsets.device)
        return torch.searchsorted(self.offsets, rows, right=True) - 1


def make_cells(cell_ids: Tensor, pools: Tensor, reverse: ReverseIndex | None = None) -> Cells:
    """cell_ids [T, R] (R cells per token), pools [G, M] -> the sorted layout, N = T * R.

    `reverse` is the pools' own reverse index, where somebody keeps it.
    """
    rows_per_token = cell_ids.shape[1]
    row_cells, order, offsets = sort_by_cell(cell_ids.flatten(), pools.shape[0])
    return Cells(
        order if rows_per_token == 1 else order.div(rows_per_token, rounding_mode="floor"),
        offsets,
        pools,
        order,
        rows_per_token,
        _version(pools),
        row_cells,
        _reverse=[] if reverse is None else [reverse],
    )


def sort_by_cell(cell_ids: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """cell_ids [N] -> the same sorted, the places they had (equal ones in order), and the first row
    of each cell [G + 1]."""
    if cell_ids.shape[0] >= MANY_KEYS and num_cells <= 2**15:
        # A GPU takes a pass over all keys for every byte of one.
        narrow, order = cell_ids.to(torch.int16).sort(stable=True)
        row_cells = narrow.to(cell_ids.dtype)
    else:
        row_cells, order = cell_ids.sort(stable=True)
    if use_triton(row_cells):
        from airmoe.kernels.layout_triton import cell_offsets_op

        return row_cells, order, cell_offsets_op(row_cells, num_cells)
    cells = torch.arange(num_cells + 1, device=row_cells.device)
    return row_cells, order, torch.searchsorted(row_cells, cells)


def _version(pools: Tensor) -> int | None:
    if torch.compiler.is_compiling() or pools.is_inference():
        return None
    return pools._version


# What the plain-PyTorch kernels walk through cells with. Rows of a big table are read, and products
# added into it, through reused buffers: fresh memory costs a CPU more than the copy into it. A pool
# of 1,024 rows is a megabyte, and there are hundreds of pools in one forward.


def nonempty_cells(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """(cell, its rows) for each cell that has rows. A loop of the host, on CPUs."""
    bounds = offsets.tolist()
    for cell, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            yield cell, slice(start, stop)


class RowReader:
    """table[ids] in the dtype of the products, valid until the next read."""

    def __init__(self, table: Tensor, num_rows: int, work: torch.dtype) -> None:
        self.table, self.work = table, work
        self.buffer = table.new_empty(num_rows, table.shape[1])

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [num_rows] -> [num_rows, D]."""
        return torch.index_select(self.table, 0, ids, out=self.buffer).to(self.work)


class RowAdder:
    """Sums left.T @ right into rows of a gradient, in float32 or wider whatever the table is."""

    def __init__(self, table: Tensor, num_rows: int, work: torch.dtype) -> None:
        wide = torch.promote_types(table.dtype, torch.float32)
        self.total = torch.zeros(table.shape, dtype=wide, device=table.device)
        self.buffer = torch.empty(num_rows, table.shape[1], dtype=work, device=table.device)

    def add(self, ids: Tensor, left: Tensor, right: Tensor) -> None:
        """left [n, num_rows], right [n, D] -> added to rows ids [num_rows], each id once."""
        torch.mm(left.T, right, out=self.buffer)
        self.total.index_add_(0, ids, self.buffer.to(self.total.dtype))
