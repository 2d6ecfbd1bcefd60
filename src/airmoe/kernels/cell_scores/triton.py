"""Fine scores of a cell's rows against its pool, rows of the table fetched by index."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cells.dot_triton import dot_precision
from airmoe.kernels.cells.tiles import RowTiles
from airmoe.kernels.noise import Noise
from airmoe.kernels.noise.triton import normal

FEW_TILES = 64


@triton.jit
def score_tile(
    hidden, centroids, inverse_norms, row_keys, noise_std,
    tokens, row_mask, ids, place_mask,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMS: tl.constexpr, NOISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of some tokens of a cell against part of its pool: [BLOCK_T, BLOCK_P] float32."""
    scores = tl.zeros((BLOCK_P, BLOCK_T), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        column_mask = columns < DIM
        states = tl.load(
            hidden + tokens.to(tl.int64)[:, None] * DIM + columns[None, :],
            mask=row_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        rows = tl.load(
            centroids + ids.to(tl.int64)[:, None] * DIM + columns[None, :],
            mask=place_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        scores = tl.dot(rows, tl.trans(states), scores, input_precision=PRECISION)
    scores = tl.trans(scores)
    if NORMS:
        scores *= tl.load(inverse_norms + ids, mask=place_mask, other=0.0)[None, :]
    if NOISE:
        keys = tl.load(row_keys + tokens, mask=row_mask, other=0)
        scores += normal(keys[:, None], ids.to(tl.int32)[None, :]) * noise_std
    return scores


@triton.jit
def _scores_kernel(
    hidden, centroids, inverse_norms, row_keys, noise_std,
    tile_cells, tile_first, offsets, token_ids, pools, scores, first_tile,
    POOL: tl.constexpr, DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMS: tl.constexpr, NOISE: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    place_in_buffer = tl.program_id(1)
    cell = tl.load(tile_cells + first_tile + place_in_buffer)
    if cell >= 0:
        rows = tl.load(tile_first + first_tile + place_in_buffer) + tl.arange(0, BLOCK_T)
        row_mask = rows < tl.load(offsets + cell + 1)
        tokens = tl.load(token_ids + rows, mask=row_mask, other=0)
        places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        place_mask = places < POOL
        ids = tl.load(pools + cell.to(tl.int64) * POOL + places, mask=place_mask, other=0)
        tile = score_tile(
            hidden, centroids, inverse_norms, row_keys, noise_std,
            tokens, row_mask, ids, place_mask,
            DIM, BLOCK_T, BLOCK_P, BLOCK_D, NORMS, NOISE, PRECISION,
        )  # fmt: skip
        if TILED:  # a buffer of whole tiles instead of the rows themselves
            target = place_in_buffer * BLOCK_T + tl.arange(0, BLOCK_T)
        else:
            target = rows
        tl.store(
            scores + target.to(tl.int64)[:, None] * POOL + places[None, :],
            tile,
            mask=row_mask[:, None] & place_mask[None, :],
        )


def launch_scores(
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    noise: Noise | None,
    tiles: RowTiles,
    offsets: Tensor,
    token_ids: Tensor,
    pools: Tensor,
    scores: Tensor,
    *,
    part: tuple[int, int] | None = None,
) -> None:
    """Write scores [N, M]; with `part` = (first tile, tiles) a buffer [tiles * block, M]."""
    dim, pool = hidden.shape[1], pools.shape[1]
    first, count = (0, tiles.count) if part is None else part
    if count == 0:
        return
    config = _config(hidden.dtype, dim, pool, tiles)
    _scores_kernel[(triton.cdiv(pool, config["BLOCK_P"]), count)](
        hidden, centroids, scores if inverse_norms is None else inverse_norms,
        token_ids if noise is None else noise.row_keys, 0.0 if noise is None else noise.std,
        tiles.cells, tiles.first_rows, offsets, token_ids, pools, scores, first,
        POOL=pool, DIM=dim, BLOCK_T=tiles.block,
        NORMS=inverse_norms is not None, NOISE=noise is not None, TILED=part is not None,
        PRECISION=dot_precision(hidden.dtype), **config,
    )  # fmt: skip


def _config(dtype: torch.dtype, dim: int, pool: int, tiles: RowTiles) -> dict[str, int]:
    wide = dtype == torch.float32
    most = 64 if wide or tiles.block > 32 else 128
    if tiles.count <= FEW_TILES:
        most = 32  # decoding: more programs, so that enough rows are on their way at once
    return {
        "BLOCK_P": max(16, min(triton.next_power_of_2(pool), most)),
        "BLOCK_D": max(16, min(triton.next_power_of_2(dim), 32 if wide else 64)),
        "num_warps": 4,
        "num_stages": 3,
    }


@triton.jit
def _scale_kernel(
    grads, inverse_norms, rows, tile_cells, pools, out,
    POOL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        own = tl.load(rows + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        place_mask = places < POOL
        ids = tl.load(pools + cell.to(tl.int64) * POOL + places, mask=place_mask, other=0)
        norms = tl.load(inverse_norms + ids, mask=place_mask, other=0.0)
        entries = own[:, None] * POOL + places[None, :]
        mask = (own >= 0)[:, None] & place_mask[None, :]
        grad = tl.load(grads + entries, mask=mask, other=0.0)
        tl.store(out + entries, grad * norms[None, :], mask=mask)


def scale_by_norms(
    grad_scores: Tensor, inverse_norms: Tensor | None, tiles: RowTiles, pools: Tensor
) -> Tensor:
    """grad_scores [N, M] times 1/|w| of each entry's expert."""
    if inverse_norms is None or grad_scores.numel() == 0:
        return grad_scores
    pool = pools.shape[1]
    out = torch.empty_like(grad_scores)
    block_p = max(16, min(triton.next_power_of_2(pool), 128))
    _scale_kernel[(triton.cdiv(pool, block_p), tiles.count)](
        grad_scores, inverse_norms, tiles.rows, tiles.cells, pools, out,
        POOL=pool, BLOCK_T=tiles.block, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out
