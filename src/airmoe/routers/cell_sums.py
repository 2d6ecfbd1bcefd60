"""Sums over the rows of each cell on Triton, as operators: what losses of compiled layers read."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.cell_gates import CellGates
from airmoe.kernels.cells.tiles import RowTiles
from airmoe.kernels.noise import Noise


@torch.library.custom_op("airmoe::counts_per_entry", mutates_args=())
def counts_per_entry(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    """How many rows of each cell chose each of its experts: [G, M] int32."""
    from airmoe.kernels.cell_gates import triton

    return triton.counts_per_entry(gates, offsets, pools)


@counts_per_entry.register_fake
def _(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    return pools.new_empty(pools.shape, dtype=torch.int32)


@torch.library.custom_op("airmoe::probs_per_entry", mutates_args=())
def _probs_per_entry(
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
    log_z: Tensor,
    token_weights: Tensor,
) -> Tensor:
    from airmoe.kernels.cell_gates.triton import Scored, probs_per_entry

    noise = None if row_keys is None else Noise(row_keys, noise_std)
    tiles = RowTiles(tile_cells, tile_first, tile_rows, block)
    scored = Scored(hidden, centroids, inverse_norms, noise, tiles, offsets, token_ids, pools)
    return probs_per_entry(scored, log_z, token_weights)


@_probs_per_entry.register_fake
def _(
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
    log_z: Tensor,
    token_weights: Tensor,
) -> Tensor:
    return pools.new_empty(pools.shape, dtype=torch.float32)


def expert_probs(found: CellGates) -> Tensor:
    """[E] `found.expert_probs()`, by way of an operator."""
    hidden, centroids, inverse_norms, noise = found._operands
    cells, tiles = found._cells, found._cells.row_tiles()
    with torch.no_grad():
        sums = torch.ops.airmoe.probs_per_entry(
            hidden, centroids, inverse_norms,
            None if noise is None else noise.row_keys, 0.0 if noise is None else noise.std,
            tiles.cells, tiles.first_rows, tiles.rows, tiles.block,
            cells.offsets, cells.token_ids, cells.pools,
            found.log_z.detach(), found._token_weights,
        )  # fmt: skip
        values = cells.reverse_index(centroids.shape[0]).sum_by_expert(sums)
    return found._probs + values
