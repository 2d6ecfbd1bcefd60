"""Ranges of experts whose partial sums fit into memory together.

The partial sums of all experts would be a [G, M, D] tensor, so experts are cut into parts with
about equally many entries. A pool is sorted by expert: a part is a run of positions in it.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cells.layout_triton import count_below
from airmoe.kernels.cells.reverse import ReverseIndex

# Memory for the partial sums of one part. Where there are many rows, several matrices [N, M] are
# there at the same time, larger than these.
PART_BYTES, PART_BYTES_OF_MANY_ROWS = 512 * 2**20, 256 * 2**20
MANY_ROWS = 32_768
SEARCH_BLOCK, SUM_BLOCK = 32, 1024


@dataclass(frozen=True)
class Parts:
    """Ranges of experts; cells write the partial sums of a part one after another."""

    experts: Tensor  # [parts + 1] int32: first expert of each part
    positions: Tensor  # [G, parts + 1] int32: first pool position of each part
    shifts: Tensor  # [G, parts] int32: row of a partial sum = its position + this
    count: int
    rows: int  # the most partial sums of one part


@triton.jit
def _positions_kernel(
    starts, pools, experts, positions, num_experts, num_cells, total, share, expert_steps,
    POOL: tl.constexpr, POOL_STEPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mark = tl.minimum(part * share, total) + tl.zeros((BLOCK,), tl.int32)
    bound = count_below(starts, num_experts + 1, mark, expert_steps)
    # Experts that occur nowhere belong to some part all the same: their gradient is 0.
    bound = tl.where(part == 0, 0, tl.where(part == PARTS, num_experts, bound))
    own = tl.minimum(cells, num_cells - 1).to(tl.int64)
    position = count_below(pools + own * POOL, POOL, bound, POOL_STEPS)
    tl.store(positions + own * (PARTS + 1) + part, position, mask=cells < num_cells)
    tl.store(experts + part + cells, bound, mask=cells == 0)


@triton.jit
def _shifts_kernel(positions, shifts, num_cells, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    before = 0
    for start in range(0, num_cells, BLOCK):
        cells = start + tl.arange(0, BLOCK)
        mask = cells < num_cells
        place = cells.to(tl.int64) * (PARTS + 1) + part
        low = tl.load(positions + place, mask=mask, other=0)
        sizes = tl.load(positions + place + 1, mask=mask, other=0) - low
        shift = before + tl.cumsum(sizes, axis=0) - sizes - low
        tl.store(shifts + cells.to(tl.int64) * PARTS + part, shift, mask=mask)
        before += tl.sum(sizes, axis=0)


def make_parts(reverse: ReverseIndex, pools: Tensor, num_rows: int, row_bytes: int) -> Parts:
    """Cut the experts so that a part's partial sums, `row_bytes` each, fit into memory."""
    num_cells, pool = pools.shape
    num_experts, total = reverse.starts.shape[0] - 1, pools.numel()
    most = PART_BYTES if num_rows < MANY_ROWS else PART_BYTES_OF_MANY_ROWS
    count = max(1, triton.cdiv(total * row_bytes, most))
    share = triton.cdiv(total, count)
    experts, positions, shifts = (
        torch.empty(shape, dtype=torch.int32, device=pools.device)
        for shape in ((count + 1,), (num_cells, count + 1), (num_cells, count))
    )
    _positions_kernel[(triton.cdiv(num_cells, SEARCH_BLOCK), count + 1)](
        reverse.starts, pools, experts, positions, num_experts, num_cells, total, share,
        (num_experts + 1).bit_length(), POOL=pool, POOL_STEPS=pool.bit_length(), PARTS=count,
        BLOCK=SEARCH_BLOCK, num_warps=1,
    )  # fmt: skip
    _shifts_kernel[(count,)](positions, shifts, num_cells, PARTS=count, BLOCK=SUM_BLOCK)
    # One expert more than a share may be in: it has at most one entry per cell.
    return Parts(experts, positions, shifts, count, share + num_cells)
