"""Sorting (token, cell) rows by cell: static shapes, nothing read by the host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def sort_rows(cell_ids: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """cell_ids [N] -> (order [N], offsets [G + 1])."""
    ordered, order = cell_ids.sort(stable=True)
    return order, find_offsets(ordered, num_cells)


def find_offsets(ordered: Tensor, num_cells: int) -> Tensor:
    """Sorted cell ids [N] -> the first row of each cell: [G + 1] int64."""
    bounds = torch.arange(num_cells + 1, device=ordered.device)
    return torch.searchsorted(ordered, bounds)


def nonempty_cells(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """(cell, its rows) for each cell that has rows. Host loop of the reference kernels only."""
    bounds = offsets.tolist()
    for cell, (start, stop) in enumerate(pairwise(bounds)):
        if stop > start:
            yield cell, slice(start, stop)
