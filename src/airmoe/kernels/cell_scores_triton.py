"""Fine scores of a cell's rows against its pool, rows of the table fetched by index."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import operator
from airmoe.kernels.device_triton import dot_precision
from airmoe.kernels.layout import CellLayout, RowTiles
from airmoe.kernels.noise import Noise, noise_of
from airmoe.kernels.noise_triton import normal
from airmoe.kernels.pool_products_triton import pool_products
from airmoe.kernels.row_products_triton import make_parts, row_products

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


@dataclass(frozen=True)
class Scored:
    """What scores are made of."""

    hidden: Tensor  # [T, D]
    centroids: Tensor  # [E, D], of the same dtype
    inverse_norms: Tensor | None  # [E]
    noise: Noise | None
    layout: CellLayout

    def all_scores(self) -> Tensor:
        """[N, M] float32."""
        shape = (self.layout.num_rows, self.layout.pool)
        scores = torch.empty(shape, dtype=torch.float32, device=self.hidden.device)
        self.write(scores)
        return scores

    def write(self, scores: Tensor, part: tuple[int, int] | None = None) -> None:
        """Write scores [N, M]; with `part` = (first tile, tiles) a buffer [tiles * block, M]."""
        layout, tiles, noise = self.layout, self.layout.tiles, self.noise
        dim, pool = self.hidden.shape[1], layout.pool
        first, count = (0, tiles.count) if part is None else part
        if count == 0:
            return
        config = _config(self.hidden.dtype, dim, pool, tiles)
        _scores_kernel[(triton.cdiv(pool, config["BLOCK_P"]), count)](
            self.hidden, self.centroids,
            scores if self.inverse_norms is None else self.inverse_norms,
            layout.token_ids if noise is None else noise.row_keys,
            0.0 if noise is None else noise.std,
            tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, layout.pools,
            scores, first,
            POOL=pool, DIM=dim, BLOCK_T=tiles.block, NORMS=self.inverse_norms is not None,
            NOISE=noise is not None, TILED=part is not None,
            PRECISION=dot_precision(self.hidden.dtype), **config,
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


def backward(
    grad_scores: Tensor, scored: Scored, want_hidden: bool, want_centroids: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and centroids, empty where not wanted.

    Products are float32: these scores are a float32 tensor of somebody's graph.
    """
    hidden, centroids, layout = scored.hidden, scored.centroids, scored.layout
    grads = _scale_by_norms(grad_scores, scored.inverse_norms, layout)
    grad_hidden, grad_centroids = hidden.new_empty(0), hidden.new_empty(0)
    if want_hidden:
        products = pool_products([(grads, centroids.float())], layout, hidden.shape[0])
        grad_hidden = products.to(hidden.dtype)
    if want_centroids:
        wide, reverse = hidden.float(), layout.reverse_index(centroids.shape[0])
        parts = make_parts(layout, reverse, wide.shape[1] * wide.element_size())
        norms = scored.inverse_norms
        grad_centroids = row_products(
            grads, wide, centroids, layout, reverse, parts, inverse_norms=norms
        )
    return grad_hidden, grad_centroids


def _scale_by_norms(
    grad_scores: Tensor, inverse_norms: Tensor | None, layout: CellLayout
) -> Tensor:
    """grad_scores [N, M] times 1/|w| of each entry's expert."""
    if inverse_norms is None or grad_scores.numel() == 0:
        return grad_scores
    tiles, pool = layout.tiles, layout.pool
    out = torch.empty_like(grad_scores)
    block_p = max(16, min(triton.next_power_of_2(pool), 128))
    _scale_kernel[(triton.cdiv(pool, block_p), tiles.count)](
        grad_scores, inverse_norms, tiles.rows, tiles.cells, layout.pools, out,
        POOL=pool, BLOCK_T=tiles.block, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out


@operator("airmoe::cell_scores")
def cell_scores_op(
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
    layout: list[Tensor],
) -> Tensor:
    """hidden and centroids in one dtype -> [N, M] float32."""
    noise = noise_of(row_keys, noise_std)
    return Scored(hidden, centroids, inverse_norms, noise, CellLayout.of(layout)).all_scores()


@operator("airmoe::cell_scores_backward")
def cell_scores_backward_op(
    grad_scores: Tensor,
    hidden: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    layout: list[Tensor],
    want_hidden: bool,
    want_centroids: bool,
) -> tuple[Tensor, Tensor]:
    scored = Scored(hidden, centroids, inverse_norms, None, CellLayout.of(layout))
    return backward(grad_scores, scored, want_hidden, want_centroids)


@cell_scores_op.register_fake
def _(hidden: Tensor, *rest: Any) -> Tensor:
    layout = CellLayout.of(rest[-1])
    return hidden.new_empty(layout.num_rows, layout.pool, dtype=torch.float32)


@cell_scores_backward_op.register_fake
def _(_grad_scores: Tensor, hidden: Tensor, centroids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    want_hidden, want_centroids = rest[-2:]
    return (
        torch.empty_like(hidden) if want_hidden else hidden.new_empty(0),
        torch.empty_like(centroids) if want_centroids else hidden.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, centroids, inverse_norms, _row_keys, _std, layout = inputs
    ctx.save_for_backward(hidden, centroids, inverse_norms, *layout)


def _backward(ctx: Any, grad_scores: Tensor) -> tuple[Any, ...]:
    hidden, centroids, inverse_norms, *layout = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    grads = cell_scores_backward_op(
        grad_scores.contiguous(), hidden, centroids, inverse_norms, layout, *wanted
    )
    found = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
    return *found, None, None, None, [None] * len(layout)


cell_scores_op.register_autograd(_backward, setup_context=_setup)
