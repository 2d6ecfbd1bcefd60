"""Jitter as a tensor of its own, where no kernel adds it on the way."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.noise.triton import normal
from airmoe.kernels.operators import operator

ROWS, COLUMNS = 8, 256
PAIRS = 2048


@triton.jit
def _rows_kernel(
    row_keys, columns, out, num_rows, num_columns, std, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, place_mask = rows < num_rows, places < num_columns
    keys = tl.load(row_keys + rows, mask=row_mask, other=0)
    names = tl.load(columns + places, mask=place_mask, other=0).to(tl.int32)
    tl.store(
        out + rows.to(tl.int64)[:, None] * num_columns + places[None, :],
        normal(keys[:, None], names[None, :]) * std,
        mask=row_mask[:, None] & place_mask[None, :],
    )


@triton.jit
def _pairs_kernel(row_keys, columns, out, size, std, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    keys = tl.load(row_keys + places, mask=mask, other=0)
    names = tl.load(columns + places, mask=mask, other=0).to(tl.int32)
    tl.store(out + places, normal(keys, names) * std, mask=mask)


@operator("airmoe::noise_rows")
def noise_rows(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    """Every row at every column: row_keys [R] int32, columns [C] -> [R, C] float32."""
    num_rows, num_columns = row_keys.shape[0], columns.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=torch.float32, device=row_keys.device)
    if out.numel():
        grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))
        _rows_kernel[grid](
            row_keys.contiguous(), columns.contiguous(), out, num_rows, num_columns, std,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


@noise_rows.register_fake
def _(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    return row_keys.new_empty(row_keys.shape[0], columns.shape[0], dtype=torch.float32)


@operator("airmoe::noise_pairs")
def noise_pairs(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    """Pair by pair: two int tensors of one broadcast shape -> float32 of that shape."""
    row_keys, columns = torch.broadcast_tensors(row_keys, columns)
    out = torch.empty(row_keys.shape, dtype=torch.float32, device=row_keys.device)
    if out.numel():
        _pairs_kernel[(triton.cdiv(out.numel(), PAIRS),)](
            row_keys.contiguous(), columns.contiguous(), out, out.numel(), std,
            BLOCK=PAIRS, num_warps=8,
        )  # fmt: skip
    return out


@noise_pairs.register_fake
def _(row_keys: Tensor, columns: Tensor, std: float) -> Tensor:
    shape = torch.broadcast_shapes(row_keys.shape, columns.shape)
    return row_keys.new_empty(shape, dtype=torch.float32)
