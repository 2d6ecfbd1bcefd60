"""`airmoe::cell_gates`: scores, selection and gates as one operator.

Its outputs are gates, log Z, `probs` and the scores where they are kept, else nothing. `probs` is
zero. It carries a gradient: the sums of the probabilities are computed only when somebody reads
them, added to it, and their gradient then arrives here with the others, so that hidden states and
centroids are multiplied once for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.cell_gates.expert_choice_triton import gates_of_experts_choice
from airmoe.kernels.cell_gates.triton import Scored, make_gates, score_grads
from airmoe.kernels.cells import FEW_ROWS
from airmoe.kernels.cells.parts_triton import make_parts
from airmoe.kernels.cells.pool_products_triton import pool_products
from airmoe.kernels.cells.reverse import ReverseIndex
from airmoe.kernels.cells.row_products_triton import partial_dtype, row_products
from airmoe.kernels.cells.tiles import RowTiles
from airmoe.kernels.cells.used_triton import used_entries
from airmoe.kernels.noise import Noise
from airmoe.kernels.operators import operator


@operator("airmoe::cell_gates")
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
    valid: Tensor,
    top_k: int | None,
    capacity: Tensor | None,
    carry_probs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    noise = None if row_keys is None else Noise(row_keys, noise_std)
    tiles = RowTiles(tile_cells, tile_first, tile_rows, block)
    scored = Scored(hidden, centroids, inverse_norms, noise, tiles, offsets, token_ids, pools)
    if top_k is not None:
        gates, log_z, scores = make_gates(scored, valid, top_k)
    else:
        assert capacity is not None
        reverse = ReverseIndex(entries, starts)
        gates, log_z, scores = gates_of_experts_choice(scored, valid, capacity, reverse)
    probs = log_z.new_zeros(centroids.shape[0] if carry_probs else 0)
    return gates, log_z, probs, log_z.new_empty(0) if scores is None else scores


@_forward.register_fake
def _(hidden: Tensor, centroids: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    token_ids, pools = rest[8:10]
    shape = (token_ids.shape[0], pools.shape[1])
    kept = shape if hidden.dtype == torch.float32 else 0
    return (
        hidden.new_empty(shape),
        hidden.new_empty(shape[0], dtype=torch.float32),
        hidden.new_empty(centroids.shape[0] if rest[-1] else 0, dtype=torch.float32),
        hidden.new_empty(kept, dtype=torch.float32),
    )


@operator("airmoe::cell_gates_backward")
def _backward(
    grad_gates: Tensor | None,
    grad_log_z: Tensor | None,
    grad_probs: Tensor | None,
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
    valid: Tensor,
    gates: Tensor,
    log_z: Tensor,
    kept: Tensor,
    over_all: bool,
    want_hidden: bool,
    want_centroids: bool,
) -> tuple[Tensor, Tensor]:
    noise = None if row_keys is None else Noise(row_keys, noise_std)
    tiles = RowTiles(tile_cells, tile_first, tile_rows, block)
    scored = Scored(hidden, centroids, inverse_norms, noise, tiles, offsets, token_ids, pools)
    grads = score_grads(
        scored, gates, log_z, valid, kept if scored.keeps_scores else None,
        grad_gates, grad_log_z, grad_probs, over_all=over_all,
    )  # fmt: skip
    grad_hidden = hidden.new_empty(0)
    if want_hidden:
        pairs = [(grads, centroids)]
        grad_hidden = pool_products(pairs, tiles, offsets, token_ids, pools, hidden.shape[0])
    grad_centroids = hidden.new_empty(0)
    if want_centroids:
        reverse = ReverseIndex(entries, starts)
        dtype = partial_dtype(hidden.dtype, projected=inverse_norms is not None)
        parts = make_parts(reverse, pools, token_ids.shape[0], hidden.shape[1] * dtype.itemsize)
        counts = None
        if token_ids.shape[0] <= FEW_ROWS * pools.shape[0]:  # some cells may have no rows at all
            counts = offsets.diff().int().unsqueeze(-1).expand(pools.shape).contiguous()
            reverse = used_entries(reverse, counts)
        grad_centroids = row_products(
            grads, hidden, centroids, offsets, token_ids, pools, reverse, parts,
            inverse_norms=inverse_norms, counts=counts,
        )  # fmt: skip
    return grad_hidden, grad_centroids


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    (hidden, centroids), (want_hidden, want_centroids) = inputs[3:5], inputs[-2:]
    return (
        torch.empty_like(hidden) if want_hidden else hidden.new_empty(0),
        torch.empty_like(centroids) if want_centroids else hidden.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, centroids, inverse_norms, row_keys, noise_std, *rest = inputs
    (
        cells,
        first,
        rows,
        block,
        offsets,
        token_ids,
        pools,
        entries,
        starts,
        valid,
        top_k,
        _capacity,
        _carry,
    ) = rest
    over_all = top_k in (1, None)  # gates are probabilities among all candidates
    ctx.fixed = (noise_std, block, over_all)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        hidden, centroids, inverse_norms, row_keys, cells, first, rows,
        offsets, token_ids, pools, entries, starts, valid, output[0], output[1], output[3],
    )  # fmt: skip


def _autograd(
    ctx: Any,
    grad_gates: Tensor | None,
    grad_log_z: Tensor | None,
    grad_probs: Tensor | None,
    _grad_scores: None,
) -> tuple[Tensor | None, ...]:
    hidden, centroids, inverse_norms, row_keys, cells, first, rows, *rest = ctx.saved_tensors
    noise_std, block, over_all = ctx.fixed
    want_hidden, want_centroids = ctx.needs_input_grad[:2]
    upstream = [
        None if grad is None else grad.contiguous() for grad in (grad_gates, grad_log_z, grad_probs)
    ]
    if all(grad is None for grad in upstream):
        return (None,) * 18
    grad_hidden, grad_centroids = torch.ops.airmoe.cell_gates_backward(
        *upstream, hidden, centroids, inverse_norms, row_keys, noise_std,
        cells, first, rows, block, *rest, over_all, want_hidden, want_centroids,
    )  # fmt: skip
    return (
        grad_hidden if want_hidden else None,
        grad_centroids if want_centroids else None,
        *(None,) * 16,
    )


_forward.register_autograd(_autograd, setup_context=_setup)
