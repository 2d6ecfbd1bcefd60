"""Groups of cells of similar size: what batched products take instead of one cell at a time.

A GPU waits for launches when every cell is a product of its own. Padding stands for a row (and a
token) past the last one: per-row tensors get one more row, of zeros, for padding to read and write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

GROUP_BYTES = 256 * 2**20  # of one gathered table, and of the padded rows, of one group


@dataclass(frozen=True)
class Group:
    """Cells padded to the rows of the largest; a very large cell may be in several groups."""

    rows: Tensor  # [cells, length] the row of each place; the number of rows where it is padding
    tokens: Tensor  # [cells, length] its token; the number of tokens where it is padding
    cells: Tensor  # [cells]


class Part(NamedTuple):
    """Some or all rows of one cell."""

    cell: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def make_groups(
    token_ids: Tensor,
    offsets: Tensor,
    num_tokens: int,
    *,
    table_bytes: int,
    row_bytes: int,
    budget: int = GROUP_BYTES,
) -> list[Group]:
    """token_ids [N], offsets [G + 1] -> groups that hold every row exactly once.

    A cell costs `table_bytes` for its gathered rows and `row_bytes` for each of its places. Two
    copies cross between host and device, whatever the number of groups.
    """
    plan = plan_groups(offsets.tolist(), table_bytes, row_bytes, budget)
    if not plan:
        return []
    parts = [part for group in plan for part in group]
    lengths = [group[0].size for group in plan for _ in group]
    ends = list(accumulate(lengths))
    # What takes a place's position among all places to its row.
    shifts = [
        part.start + length - end for part, length, end in zip(parts, lengths, ends, strict=True)
    ]
    columns = [shifts, [part.stop for part in parts], lengths, [part.cell for part in parts]]
    shift, stop, length, cells = torch.tensor(columns, device=offsets.device)
    total, num_rows = ends[-1], token_ids.shape[0]
    rows = torch.arange(total, device=offsets.device)
    rows += shift.repeat_interleave(length, output_size=total)
    padding = rows >= stop.repeat_interleave(length, output_size=total)
    # Clamped before it is read, and marked after: no index is ever out of range.
    tokens = token_ids.index_select(0, rows.clamp(max=num_rows - 1))
    tokens.masked_fill_(padding, num_tokens)
    rows.masked_fill_(padding, num_rows)
    counts = [len(group) for group in plan]
    places = [len(group) * group[0].size for group in plan]
    return [
        Group(own_rows.view(len(own_cells), -1), own_tokens.view(len(own_cells), -1), own_cells)
        for own_rows, own_tokens, own_cells in zip(
            rows.split(places), tokens.split(places), cells.split(counts), strict=True
        )
    ]


def plan_groups(
    bounds: list[int], table_bytes: int, row_bytes: int, budget: int
) -> list[list[Part]]:
    """The parts of each group, largest first: at most half of a group is padding."""
    groups: list[list[Part]] = []
    for part in sorted(_parts(bounds, max(1, budget // row_bytes)), key=lambda p: -p.size):
        if groups:
            longest, count = groups[-1][0].size, len(groups[-1]) + 1
            fits = count * max(table_bytes, longest * row_bytes) <= budget
            if fits and 2 * part.size >= longest:
                groups[-1].append(part)
                continue
        groups.append([part])
    return groups


def _parts(bounds: list[int], most: int) -> Iterator[Part]:
    """Non-empty cells, in equal parts of at most `most` rows."""
    for cell, (start, stop) in enumerate(pairwise(bounds)):
        count = -(-(stop - start) // most)
        step = -(-(stop - start) // max(1, count))
        for i in range(count):
            yield Part(cell, start + i * step, min(start + (i + 1) * step, stop))


def with_zero_row(values: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, width] -> [n + 1, width] in `dtype`: the last row is what padding reads."""
    padded = torch.empty(values.shape[0] + 1, values.shape[1], dtype=dtype, device=values.device)
    padded[:-1] = values
    padded[-1] = 0
    return padded


def without_last_row(values: Tensor) -> Tensor:
    """Drops the row that padding wrote, in place: autograd functions had better return no view."""
    return values.resize_(values.shape[0] - 1, values.shape[1])


def gather(table: Tensor, ids: Tensor, work: torch.dtype) -> Tensor:
    """table [n, width], ids [cells, k] -> [cells, k, width] in `work`."""
    return table.index_select(0, ids.flatten()).view(*ids.shape, -1).to(work)


def put_rows(target: Tensor, ids: Tensor, values: Tensor) -> None:
    """target[ids] = values, for ids [cells, k] and values [cells, k, width]."""
    target.index_copy_(0, ids.flatten(), values.flatten(0, 1).to(target.dtype))


def add_rows(total: Tensor, ids: Tensor, values: Tensor) -> None:
    """total[ids] += values, in the dtype of the total; an id may come several times."""
    total.index_add_(0, ids.flatten(), values.flatten(0, 1).to(total.dtype))
