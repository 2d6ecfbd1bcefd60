"""Fine scores of a cell's rows against its pool, rows of the table fetched by index."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_products_triton import pool_products, table_gradients
from airmoe.kernels.cell_scores import ScoreInputs
from airmoe.kernels.cells import CellLayout, RowTiles
from airmoe.kernels.device_triton import (
    block_size,
    dot_precision,
    load_rows,
    operands_of_tile,
    part_of_pool,
    store_rows,
)
from airmoe.kernels.noise_triton import normal

FEW_TILES = 64


@triton.jit
def products_tile(
    table, values, ids, place_mask, tokens, row_mask,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of a table times those of some tokens: [BLOCK_P, BLOCK_T] float32."""
    products = tl.zeros((BLOCK_P, BLOCK_T), tl.float32)
    for start in range(0, DIM, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        states = load_rows(values, tokens, row_mask, columns, DIM)
        rows = load_rows(table, ids, place_mask, columns, DIM)
        products = tl.dot(rows, tl.trans(states), products, input_precision=PRECISION)
    return products


@triton.jit
def score_tile(
    hidden, centroids, inverse_norms, row_keys, noise_std,
    tokens, row_mask, ids, place_mask,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of some tokens of a cell against part of its pool: [BLOCK_T, BLOCK_P] float32."""
    scores = products_tile(
        centroids, hidden, ids, place_mask, tokens, row_mask,
        DIM, BLOCK_T, BLOCK_P, BLOCK_D, PRECISION,
    )  # fmt: skip
    scores = tl.trans(scores)
    if inverse_norms is not None:
        scores *= tl.load(inverse_norms + ids, mask=place_mask, other=0.0)[None, :]
    if row_keys is not None:
        keys = tl.load(row_keys + tokens, mask=row_mask, other=0)
        scores += normal(keys[:, None], ids.to(tl.int32)[None, :]) * noise_std
    return scores


@triton.jit
def _scores_kernel(
    hidden, centroids, inverse_norms, row_keys, noise_std,
    tile_cells, tile_first, offsets, token_ids, pools, scores, first_tile,
    POOL: tl.constexpr, DIM: tl.constexpr, TILED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    place_in_buffer = tl.program_id(1)
    cell = tl.load(tile_cells + first_tile + place_in_buffer)
    if cell >= 0:
        tile = first_tile + place_in_buffer
        rows, row_mask, tokens, places, place_mask, ids = operands_of_tile(
            tile_first, offsets, token_ids, pools, tile, cell, POOL, BLOCK_T, BLOCK_P
        )
        found = score_tile(
            hidden, centroids, inverse_norms, row_keys, noise_std,
            tokens, row_mask, ids, place_mask,
            DIM, BLOCK_T, BLOCK_P, BLOCK_D, PRECISION,
        )  # fmt: skip
        # In a buffer of whole tiles, or in the rows themselves.
        target = place_in_buffer * BLOCK_T + tl.arange(0, BLOCK_T) if TILED else rows
        store_rows(scores, target, row_mask, places, found, POOL)


def cell_scores(*operands: Any) -> Tensor:
    """hidden and centroids in one dtype -> [N, M] float32."""
    return all_scores(ScoreInputs.of(*operands))


def all_scores(scored: ScoreInputs) -> Tensor:
    """[N, M] float32."""
    shape = (scored.layout.num_rows, scored.layout.pool_width)
    scores = torch.empty(shape, dtype=torch.float32, device=scored.hidden.device)
    write_scores(scored, scores)
    return scores


def write_scores(scored: ScoreInputs, scores: Tensor, part: slice | None = None) -> None:
    """Write scores [N, M], or those of a part of the tiles to a buffer [tiles * block, M]."""
    layout, tiles = scored.layout, scored.layout.tiles
    dim, pool = scored.hidden.shape[1], layout.pool_width
    first, last = (0, tiles.count) if part is None else (part.start, part.stop)
    config = _config(scored.hidden.dtype, dim, pool, tiles)
    _scores_kernel[(triton.cdiv(pool, config["BLOCK_P"]), last - first)](
        scored.hidden, scored.centroids, scored.inverse_norms, scored.row_keys, scored.noise_std,
        tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, layout.pools,
        scores, first,
        POOL=pool, DIM=dim, BLOCK_T=tiles.block, TILED=part is not None,
        PRECISION=dot_precision(scored.hidden.dtype), **config,
    )  # fmt: skip


def _config(dtype: torch.dtype, dim: int, pool: int, tiles: RowTiles) -> dict[str, int]:
    wide = dtype == torch.float32
    few = tiles.count <= FEW_TILES
    most = 64 if wide or tiles.block > 32 else 128
    if few:
        most = 32  # decoding: more programs, so that enough rows are on their way at once
    return {
        "BLOCK_P": block_size(pool, most),
        "BLOCK_D": block_size(dim, 32 if wide else 128 if few else 64),
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
        own = tl.load(rows + tile * BLOCK_T + tl.arange(0, BLOCK_T))
        first = tl.program_id(0) * BLOCK_P
        places, place_mask, ids = part_of_pool(pools, cell, first, POOL, BLOCK_P)
        norms = tl.load(inverse_norms + ids, mask=place_mask, other=0.0)
        grad = load_rows(grads, own, own >= 0, places, POOL)
        store_rows(out, own, own >= 0, places, grad * norms[None, :], POOL)


def cell_scores_backward(call: Any, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of the wanted of hidden and centroids.

    Products are float32: these scores are a float32 tensor of somebody's graph.
    """
    scored = ScoreInputs.of(*call.inputs)
    grads = _scale_by_norms(call.grad_scores, scored.inverse_norms, scored.layout)
    return operand_gradients(scored, grads, wanted)


def operand_gradients(scored: ScoreInputs, grads: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of the wanted of hidden and centroids, by products in the dtype of `grads`.

    `grads` [N, M] are those of the scores times 1/|w|.
    """
    hidden, centroids, layout = scored.hidden, scored.centroids, scored.layout
    found: dict[str, Tensor] = {}
    if "hidden" in wanted:
        products = pool_products([(grads, centroids.to(grads.dtype))], layout, hidden.shape[0])
        found["hidden"] = products.to(hidden.dtype)
    if "centroids" in wanted:
        products = {"centroids": (grads, hidden.to(grads.dtype), centroids)}
        norms = scored.inverse_norms
        found |= table_gradients(products, layout, inverse_norms=norms)
    return found


def _scale_by_norms(
    grad_scores: Tensor, inverse_norms: Tensor | None, layout: CellLayout
) -> Tensor:
    """grad_scores [N, M] times 1/|w| of each entry's expert."""
    if inverse_norms is None:
        return grad_scores
    tiles, pool = layout.tiles, layout.pool_width
    out = torch.empty_like(grad_scores)
    block_p = block_size(pool, 128)
    _scale_kernel[(triton.cdiv(pool, block_p), tiles.count)](
        grad_scores, inverse_norms, tiles.rows, tiles.cells, layout.pools, out,
        POOL=pool, BLOCK_T=tiles.block, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out
