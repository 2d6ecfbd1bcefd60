"""out[token] = X[row] @ table[pool], rows of the table fetched by index.

X is [N, M], a row per token and cell.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.device_triton import dot, part_dtype
from airmoe.kernels.layout import CellLayout


@triton.jit
def _pool_products_kernel(
    x_1, table_1, x_2, table_2, out,
    tile_cells, tile_first, offsets, token_ids, pools,
    POOL: tl.constexpr, DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    TWO: tl.constexpr, BY_TOKEN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        rows = tl.load(tile_first + tile) + tl.arange(0, BLOCK_T)
        row_mask = rows < tl.load(offsets + cell + 1)
        columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        column_mask = columns < DIM
        x_rows = rows.to(tl.int64)[:, None] * POOL
        tokens_first: tl.constexpr = BLOCK_T >= 64
        if tokens_first:
            total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        else:
            total = tl.zeros((BLOCK_D, BLOCK_T), tl.float32)
        for start in range(0, POOL, BLOCK_P):
            places = start + tl.arange(0, BLOCK_P)
            place_mask = places < POOL
            ids = tl.load(pools + cell.to(tl.int64) * POOL + places, mask=place_mask, other=0)
            entries = ids.to(tl.int64)[:, None] * DIM + columns[None, :]
            mask = place_mask[:, None] & column_mask[None, :]
            x_mask = row_mask[:, None] & place_mask[None, :]
            x = tl.load(x_1 + x_rows + places[None, :], mask=x_mask, other=0.0)
            table = tl.load(table_1 + entries, mask=mask, other=0.0)
            if tokens_first:
                total = dot(x, table, total, False, False, PART)
            else:
                total = dot(table, x, total, True, True, PART)
            if TWO:
                x = tl.load(x_2 + x_rows + places[None, :], mask=x_mask, other=0.0)
                table = tl.load(table_2 + entries, mask=mask, other=0.0)
                if tokens_first:
                    total = dot(x, table, total, False, False, PART)
                else:
                    total = dot(table, x, total, True, True, PART)
        if not tokens_first:
            total = tl.trans(total)
        if BY_TOKEN:
            target = tl.load(token_ids + rows, mask=row_mask, other=0).to(tl.int64)
        else:
            target = rows.to(tl.int64)
        tl.store(
            out + target[:, None] * DIM + columns[None, :],
            total.to(out.dtype.element_ty),
            mask=row_mask[:, None] & column_mask[None, :],
        )


def pool_products(
    pairs: list[tuple[Tensor, Tensor]], layout: CellLayout, num_tokens: int
) -> Tensor:
    """Sum over pairs of X [N, M] @ table[pool]: [T, D] in the table's dtype.

    A token with several rows gets their sum, taken in float32.
    """
    x_1, table_1 = pairs[0]
    x_2, table_2 = pairs[-1]
    tiles, dim = layout.tiles, table_1.shape[1]
    by_token = layout.num_rows == num_tokens  # one row each: rows are a permutation of tokens
    dtype = table_1.dtype if by_token else torch.float32
    out = torch.empty(layout.num_rows, dim, dtype=dtype, device=table_1.device)
    if out.numel() == 0:
        return out if by_token else out.new_zeros(num_tokens, dim).to(table_1.dtype)
    config = _pool_config(table_1.dtype, dim, layout.pool, len(pairs))
    _pool_products_kernel[(triton.cdiv(dim, config["BLOCK_D"]), tiles.count)](
        x_1, table_1, x_2, table_2, out,
        tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, layout.pools,
        POOL=layout.pool, DIM=dim, BLOCK_T=tiles.block, TWO=len(pairs) == 2, BY_TOKEN=by_token,
        PART=part_dtype(), **config,
    )  # fmt: skip
    if by_token:
        return out
    rows = layout.token_ids.argsort(stable=True)  # token by token; every token has equally many
    return out.index_select(0, rows).view(num_tokens, -1, dim).sum(1).to(table_1.dtype)


def _pool_config(dtype: torch.dtype, dim: int, pool: int, pairs: int) -> dict[str, int]:
    wide = dtype == torch.float32
    return {
        "BLOCK_D": max(16, min(triton.next_power_of_2(dim), 64 if wide else 128)),
        "BLOCK_P": max(16, min(triton.next_power_of_2(pool), 32 if wide or pairs == 2 else 64)),
        "num_warps": 4,
        "num_stages": 1 if wide else 3,  # parts of float32 are made in registers
    }
