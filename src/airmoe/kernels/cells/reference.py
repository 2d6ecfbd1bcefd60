"""Where cells begin in rows sorted by cell, and the host's walk through them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


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
