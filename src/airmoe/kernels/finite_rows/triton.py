"""Rows with a finite squared norm, in one pass over them."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.operators import operator

TILE_ELEMENTS = 8192


@triton.jit
def _finite_kernel(
    hidden, out, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_rows
    square = tl.zeros((ROWS,), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        mask = row_mask[:, None] & (columns < DIM)[None, :]
        values = tl.load(hidden + rows[:, None] * DIM + columns[None, :], mask=mask, other=0.0)
        values = values.to(tl.float32)
        square += tl.sum(values * values, axis=1)
    tl.store(out + rows, square < float("inf"), mask=row_mask)  # False for NaN as well


@operator("airmoe::finite_rows")
def finite_rows_op(hidden: Tensor) -> Tensor:
    hidden = hidden.contiguous()
    num_rows, dim = hidden.shape
    out = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
    if num_rows:
        block = min(triton.next_power_of_2(dim), 1024)
        rows = max(1, TILE_ELEMENTS // block)
        _finite_kernel[(triton.cdiv(num_rows, rows),)](
            hidden, out, num_rows, DIM=dim, ROWS=rows, BLOCK_D=block, num_warps=8
        )
    return out


@finite_rows_op.register_fake
def _(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=torch.bool)
