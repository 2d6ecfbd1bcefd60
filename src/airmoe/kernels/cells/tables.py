"""Reading rows of a big table by index, and adding products into it, through reused buffers.

Fresh memory costs a CPU more than the copy into it: a pool of 1,024 rows is a megabyte, and there
are hundreds of pools in one forward.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
