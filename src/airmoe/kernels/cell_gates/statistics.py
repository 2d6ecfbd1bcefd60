"""Sums over the rows of each cell, as operators: what losses and metrics read of a routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.cell_gates import statistics_triton
from airmoe.kernels.cell_gates.triton import Scored
from airmoe.kernels.cells import used_triton
from airmoe.kernels.cells.tiles import RowTiles
from airmoe.kernels.noise import Noise
from airmoe.kernels.operators import operator


@operator("airmoe::counts_per_entry")
def counts_per_entry(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    """How many rows of each cell chose each of its experts: [G, M] int32."""
    return used_triton.counts_per_entry(gates, offsets, pools)


@counts_per_entry.register_fake
def _(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    return pools.new_empty(pools.shape, dtype=torch.int32)


@operator("airmoe::probs_per_entry")
def probs_per_entry(
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
    kept: Tensor,
    log_z: Tensor,
    valid: Tensor,
) -> Tensor:
    """Sum over each cell's valid rows of the softmax over their candidates: [G, M] float32."""
    noise = None if row_keys is None else Noise(row_keys, noise_std)
    tiles = RowTiles(tile_cells, tile_first, tile_rows, block)
    scored = Scored(hidden, centroids, inverse_norms, noise, tiles, offsets, token_ids, pools)
    return statistics_triton.probs_per_entry(
        scored, kept if scored.keeps_scores else None, log_z, valid
    )


@probs_per_entry.register_fake
def _(*inputs: Any) -> Tensor:
    pools = inputs[11]
    return pools.new_empty(pools.shape, dtype=torch.float32)
