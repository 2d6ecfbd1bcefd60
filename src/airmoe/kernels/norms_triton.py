"""Norms of rows in one pass over them, in their own dtype: no wider copy of a table exists."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.device_triton import as_stored, block_size, inverse_root, load_rows, store_rows

TILE_ELEMENTS = 8192  # [rows, D] of one fetch
WIDEST = 256  # columns of it
FEW_ROWS = 1024  # with fewer, a program of its own for each


@triton.jit
def _norms_kernel(
    table, inverse, num_rows, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real = row < num_rows
    squares = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        values = load_rows(table, row, real, column, DIM).to(tl.float32)
        squares += values * values
    tl.store(inverse + row, inverse_root(tl.sum(squares, axis=1)), mask=real)


def inverse_norms(rows: Tensor) -> Tensor:
    """1/|w| of every row: [E, D] -> [E] float32."""
    num_rows, dim = rows.shape
    inverse = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    block_d = block_size(dim, WIDEST)
    block_r = TILE_ELEMENTS // block_d
    _norms_kernel[(triton.cdiv(num_rows, block_r),)](
        as_stored(rows), inverse, num_rows,
        DIM=dim, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return inverse


@triton.jit
def _counted_kernel(
    hidden, mask, out, valid, num_rows,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    counts = rows < num_rows
    if mask is not None:
        counts &= tl.load(mask + rows, mask=counts, other=0) != 0
    square = tl.zeros((ROWS,), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        values = load_rows(hidden, rows, counts, columns, DIM).to(tl.float32)
        square += tl.sum(values * values, axis=1)
    counts &= square < float("inf")  # False for NaN as well
    tl.store(valid + rows, counts, mask=rows < num_rows)
    for start in range(0, DIM, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        values = load_rows(hidden, rows, counts, columns, DIM)
        store_rows(out, rows, rows < num_rows, columns, values, DIM)


def counted_rows(hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """hidden [T, D] with 0 in the rows that do not count, and which do: [T]."""
    num_rows, dim = hidden.shape
    out = hidden.new_empty(hidden.shape)
    valid = torch.empty(num_rows, dtype=torch.bool, device=hidden.device)
    block = min(triton.next_power_of_2(dim), 1024)
    rows = max(1, TILE_ELEMENTS // block) if num_rows >= FEW_ROWS else 1
    _counted_kernel[(triton.cdiv(num_rows, rows),)](
        hidden.contiguous(), None if mask is None else mask.contiguous(), out, valid, num_rows,
        DIM=dim, ROWS=rows, BLOCK_D=block, num_warps=8 if rows > 1 else 1,
    )  # fmt: skip
    return out, valid


def counted_rows_backward(call: Any, _wanted: set[str]) -> dict[str, Tensor]:
    """Gradient of hidden: none for rows that do not count."""
    return {"hidden": torch.where(call.valid.unsqueeze(-1), call.grad_rows, 0)}
