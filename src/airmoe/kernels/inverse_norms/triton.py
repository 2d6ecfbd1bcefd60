"""1/|w| of every row in one pass over the table, in its own dtype: no wider copy of it exists."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.assign.triton import as_stored
from airmoe.kernels.operators import operator
from airmoe.kernels.shortlist.triton import inverse_root

TILE_ELEMENTS = 8192  # [rows, D] of one fetch
WIDEST = 256  # columns of it
NUM_WARPS = 4


@triton.jit
def _norms_kernel(
    table, inverse, num_rows, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < num_rows
    squares = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        values = tl.load(
            table + row.to(tl.int64)[:, None] * DIM + column[None, :],
            mask=real[:, None] & (column < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        squares += values * values
    tl.store(inverse + row, inverse_root(tl.sum(squares, axis=1)), mask=real)


@operator("airmoe::inverse_norms")
def inverse_norms_op(rows: Tensor) -> Tensor:
    """`reference.inverse_norms`: [E, D] -> [E] float32."""
    num_rows, dim = rows.shape
    inverse = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    if num_rows:
        block_d = min(max(triton.next_power_of_2(dim), 16), WIDEST)
        block_r = TILE_ELEMENTS // block_d
        _norms_kernel[(triton.cdiv(num_rows, block_r),)](
            as_stored(rows), inverse, num_rows,
            DIM=dim, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=NUM_WARPS,
        )  # fmt: skip
    return inverse


@inverse_norms_op.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float32)
