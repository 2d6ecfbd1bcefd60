"""Probabilities of every entry of the pools, summed over the rows of its cell."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_gates.triton import Scored
from airmoe.kernels.cell_scores.triton import score_tile
from airmoe.kernels.cells.dot_triton import dot_precision


@triton.jit
def _probs_kernel(
    hidden, centroids, inverse_norms, row_keys, noise_std, kept,
    offsets, token_ids, pools, log_z, valid, out,
    POOL: tl.constexpr, DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMS: tl.constexpr, NOISE: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(1)
    places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    place_mask = places < POOL
    ids = tl.load(pools + cell.to(tl.int64) * POOL + places, mask=place_mask, other=0)
    total = tl.zeros((BLOCK_P,), tl.float32)
    first = tl.load(offsets + cell)
    last = tl.load(offsets + cell + 1)
    for start in range(first, last, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        row_mask = rows < last
        tokens = tl.load(token_ids + rows, mask=row_mask, other=0)
        if KEPT:
            scores = tl.load(
                kept + rows.to(tl.int64)[:, None] * POOL + places[None, :],
                mask=row_mask[:, None] & place_mask[None, :],
                other=0.0,
            )
        else:
            scores = score_tile(
                hidden, centroids, inverse_norms, row_keys, noise_std,
                tokens, row_mask, ids, place_mask,
                DIM, BLOCK_T, BLOCK_P, BLOCK_D, NORMS, NOISE, PRECISION,
            )  # fmt: skip
        counts = tl.load(valid + tokens, mask=row_mask, other=0) != 0
        probs = tl.exp(scores - tl.load(log_z + rows, mask=row_mask, other=0.0)[:, None])
        total += tl.sum(tl.where(counts[:, None], probs, 0.0), axis=0)
    tl.store(out + cell.to(tl.int64) * POOL + places, total, mask=place_mask)


def probs_per_entry(scored: Scored, kept: Tensor | None, log_z: Tensor, valid: Tensor) -> Tensor:
    """Sum over each cell's valid rows of the softmax over their candidates: [G, M] float32."""
    dim, pool = scored.hidden.shape[1], scored.pools.shape[1]
    out = torch.empty(scored.pools.shape, dtype=torch.float32, device=log_z.device)
    wide = scored.hidden.dtype == torch.float32
    block_p = max(16, min(triton.next_power_of_2(pool), 64 if wide else 128))
    block_d = max(16, min(triton.next_power_of_2(dim), 32 if wide else 64))
    noise = scored.noise
    _probs_kernel[(triton.cdiv(pool, block_p), scored.pools.shape[0])](
        scored.hidden, scored.centroids,
        log_z if scored.inverse_norms is None else scored.inverse_norms,
        scored.token_ids if noise is None else noise.row_keys, 0.0 if noise is None else noise.std,
        log_z if kept is None else kept, scored.offsets, scored.token_ids, scored.pools,
        log_z, valid, out,
        POOL=pool, DIM=dim, BLOCK_T=scored.tiles.block, BLOCK_P=block_p, BLOCK_D=block_d,
        NORMS=scored.inverse_norms is not None, NOISE=noise is not None, KEPT=kept is not None,
        PRECISION=dot_precision(scored.hidden.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
