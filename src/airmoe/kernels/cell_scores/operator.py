"""`airmoe::cell_scores`: scores of cells by Triton, and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.cell_scores.triton import launch_scores, scale_by_norms
from airmoe.kernels.cells import Cells
from airmoe.kernels.cells.parts_triton import make_parts
from airmoe.kernels.cells.pool_products_triton import pool_products
from airmoe.kernels.cells.reverse import ReverseIndex
from airmoe.kernels.cells.row_products_triton import row_products
from airmoe.kernels.cells.tiles import RowTiles
from airmoe.kernels.noise import Noise
from airmoe.kernels.operators import operator


@operator("airmoe::cell_scores")
def _forward(
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
    tile_cells: Tensor,
    tile_first: Tensor,
    tile_rows: Tensor,
    block: int,
    offsets: Tensor,
    token_ids: Tensor,
    pools: Tensor,
    entries: Tensor,
    starts: Tensor,
) -> Tensor:
    shape = (token_ids.shape[0], pools.shape[1])
    scores = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    noise = None if row_keys is None else Noise(row_keys, noise_std)
    tiles = RowTiles(tile_cells, tile_first, tile_rows, block)
    launch_scores(hidden, centroids, inverse_norms, noise, tiles, offsets, token_ids, pools, scores)
    return scores


@_forward.register_fake
def _(hidden: Tensor, *rest: Any) -> Tensor:
    token_ids, pools = rest[9:11]
    return hidden.new_empty(token_ids.shape[0], pools.shape[1], dtype=torch.float32)


@operator("airmoe::cell_scores_backward")
def _backward(
    grad_scores: Tensor,
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    tile_cells: Tensor,
    tile_first: Tensor,
    tile_rows: Tensor,
    block: int,
    offsets: Tensor,
    token_ids: Tensor,
    pools: Tensor,
    entries: Tensor,
    starts: Tensor,
    want_hidden: bool,
    want_centroids: bool,
) -> tuple[Tensor, Tensor]:
    tiles = RowTiles(tile_cells, tile_first, tile_rows, block)
    # Kept in float32: these scores are a float32 tensor of somebody's graph.
    grads = scale_by_norms(grad_scores, inverse_norms, tiles, pools)
    wide_hidden, wide_centroids = hidden.float(), centroids.float()
    grad_hidden, grad_centroids = hidden.new_empty(0), hidden.new_empty(0)
    if want_hidden:
        pairs = [(grads, wide_centroids)]
        grad_hidden = pool_products(pairs, tiles, offsets, token_ids, pools, hidden.shape[0])
        grad_hidden = grad_hidden.to(hidden.dtype)
    if want_centroids:
        reverse = ReverseIndex(entries, starts)
        parts = make_parts(
            reverse, pools, token_ids.shape[0], wide_hidden.shape[1] * wide_hidden.element_size()
        )
        grad_centroids = row_products(
            grads, wide_hidden, centroids, offsets, token_ids, pools, reverse, parts,
            inverse_norms=inverse_norms,
        )  # fmt: skip
    return grad_hidden, grad_centroids


@_backward.register_fake
def _(_grad_scores: Tensor, hidden: Tensor, centroids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    want_hidden, want_centroids = rest[-2:]
    return (
        torch.empty_like(hidden) if want_hidden else hidden.new_empty(0),
        torch.empty_like(centroids) if want_centroids else hidden.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, centroids, inverse_norms, _row_keys, _std, cells, first, rows, block, *rest = inputs
    ctx.block = block
    ctx.save_for_backward(hidden, centroids, inverse_norms, cells, first, rows, *rest)


def _autograd(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
    hidden, centroids, inverse_norms, cells, first, rows, *rest = ctx.saved_tensors
    want_hidden, want_centroids = ctx.needs_input_grad[:2]
    grad_hidden, grad_centroids = torch.ops.airmoe.cell_scores_backward(
        grad_scores.contiguous(), hidden, centroids, inverse_norms, cells, first, rows, ctx.block,
        *rest, want_hidden, want_centroids,
    )  # fmt: skip
    return (
        grad_hidden if want_hidden else None,
        grad_centroids if want_centroids else None,
        *(None,) * 12,
    )


_forward.register_autograd(_autograd, setup_context=_setup)


def run(
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    cells: Cells,
    noise: Noise | None,
) -> Tensor:
    """`cell_scores` on Triton: [N, M] float32."""
    if hidden.dtype != centroids.dtype:
        hidden, centroids = hidden.float(), centroids.float()
    tiles, reverse = cells.row_tiles(), cells.reverse_index(centroids.shape[0])
    return torch.ops.airmoe.cell_scores(
        hidden.contiguous(), centroids.contiguous(), inverse_norms,
        None if noise is None else noise.row_keys, 0.0 if noise is None else noise.std,
        tiles.cells, tiles.first_rows, tiles.rows, tiles.block, cells.offsets, cells.token_ids,
        cells.pools, reverse.entries, reverse.starts,
    )  # fmt: skip
