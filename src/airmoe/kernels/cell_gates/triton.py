"""Scores, selection and gates of cells without keeping the scores, and the backward of all of it.

Scores exist for a few tiles of rows at a time, in float32; what is kept are the gates and the
softmax denominators, from which the backward goes on (it scores again where a statistic needs it).
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_scores.triton import launch_scores, score_tile
from airmoe.kernels.cells.tiles import RowTiles
from airmoe.kernels.cells.triton import dot_precision
from airmoe.kernels.noise import Noise
from airmoe.kernels.select.triton import gates_from_scores

BUFFER_ELEMENTS = 1 << 25  # scores that exist at once


@dataclass(frozen=True)
class Scored:
    """What scores are made of."""

    hidden: Tensor  # [T, D]
    centroids: Tensor  # [E, D], of the same dtype
    inverse_norms: Tensor | None  # [E]
    noise: Noise | None
    tiles: RowTiles
    offsets: Tensor  # [G + 1]
    token_ids: Tensor  # [N]
    pools: Tensor  # [G, M]

    def parts(self) -> list[tuple[int, int]]:
        """(first tile, number of tiles) of pieces whose scores fit into the buffer."""
        step = max(1, BUFFER_ELEMENTS // (self.tiles.block * self.pools.shape[1]))
        count = self.tiles.count
        return [(first, min(step, count - first)) for first in range(0, count, step)]

    def buffer(self) -> Tensor:
        """[rows of a piece, M] float32."""
        largest = max((count for _, count in self.parts()), default=0)
        shape = (largest * self.tiles.block, self.pools.shape[1])
        return torch.empty(shape, dtype=torch.float32, device=self.hidden.device)

    def score(self, buffer: Tensor, part: tuple[int, int]) -> Tensor:
        """Scores of one piece [rows, M]; rows that belong to no token are not written."""
        launch_scores(
            self.hidden,
            self.centroids,
            self.inverse_norms,
            self.noise,
            self.tiles,
            self.offsets,
            self.token_ids,
            self.pools,
            buffer,
            part=part,
        )
        return buffer[: part[1] * self.tiles.block]

    def rows(self, part: tuple[int, int]) -> Tensor:
        """[rows of a piece] row numbers, -1 = none."""
        block = self.tiles.block
        return self.tiles.rows[part[0] * block : (part[0] + part[1]) * block]


def make_gates(scored: Scored, valid: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(gates [N, M] in the dtype of hidden, log of the softmax denominator over all M [N])."""
    num_rows, pool = scored.token_ids.shape[0], scored.pools.shape[1]
    gates = torch.empty(num_rows, pool, dtype=scored.hidden.dtype, device=valid.device)
    log_z = torch.empty(num_rows, dtype=torch.float32, device=valid.device)
    row_valid = valid[scored.token_ids]
    buffer = scored.buffer()
    for part in scored.parts():
        scores = scored.score(buffer, part)
        gates_from_scores(scores, scored.rows(part), row_valid, top_k, gates, log_z)
    return gates, log_z


@triton.jit
def _score_grads_kernel(
    gates, grad_gates, scores, rows, tile_cells, token_ids, pools, inverse_norms,
    log_z, grad_log_z, token_weights, grad_probs, grad_scores, first_tile,
    POOL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
    GATES: tl.constexpr, LOG_Z: tl.constexpr, PROBS: tl.constexpr,
    SWITCH: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # a few rows of one tile
    row = tl.load(rows + first_tile * BLOCK_T + places).to(tl.int64)
    if tl.max(row, axis=0) >= 0:
        cell = tl.load(tile_cells + first_tile + tl.program_id(0) * ROWS // BLOCK_T).to(tl.int64)
        columns = tl.arange(0, WIDTH)
        column_mask = columns < POOL
        used = row >= 0
        mask = used[:, None] & column_mask[None, :]
        at = row[:, None] * POOL + columns[None, :]
        grad = tl.zeros((ROWS, WIDTH), tl.float32)
        if SWITCH or LOG_Z or PROBS:
            buffer = places.to(tl.int64)[:, None] * POOL + columns[None, :]
            score = tl.load(scores + buffer, mask=mask, other=0.0)
            row_log_z = tl.load(log_z + row, mask=used, other=0.0)
            probs = tl.where(mask, tl.exp(score - row_log_z[:, None]), 0.0)
        if GATES:
            gate = tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)
            weighted = gate * tl.load(grad_gates + at, mask=mask, other=0.0).to(tl.float32)
            total = tl.sum(weighted, axis=1)[:, None]
            if SWITCH:
                grad = weighted - probs * total
            else:
                # Stored gates are rounded and do not add up to 1. Where one has nearly all, its
                # gradient is a small difference that this would drown.
                sums = tl.sum(gate, axis=1)[:, None]
                grad = weighted - gate * (total / tl.where(sums > 0, sums, 1.0))
        if LOG_Z:
            grad += probs * tl.load(grad_log_z + row, mask=used, other=0.0)[:, None]
        if PROBS or NORMS:
            ids = tl.load(pools + cell * POOL + columns, mask=column_mask, other=0)
        if PROBS:
            tokens = tl.load(token_ids + row, mask=used, other=0)
            weight = tl.load(token_weights + tokens, mask=used, other=0.0)[:, None]
            wanted = tl.load(grad_probs + ids, mask=column_mask, other=0.0)[None, :]
            grad += weight * probs * (wanted - tl.sum(probs * wanted, axis=1)[:, None])
        if NORMS:  # of the row's own centroid: what comes next multiplies by w, not by w / |w|
            grad *= tl.load(inverse_norms + ids, mask=column_mask, other=0.0)[None, :]
        tl.store(grad_scores + at, grad.to(grad_scores.dtype.element_ty), mask=mask)


def score_grads(
    scored: Scored,
    gates: Tensor,
    log_z: Tensor,
    token_weights: Tensor,
    grad_gates: Tensor | None,
    grad_log_z: Tensor | None,
    grad_probs: Tensor | None,
    *,
    top_k: int,
) -> Tensor:
    """Gradient of the scores times 1/|w|, [N, M] in the dtype of hidden."""
    pool = scored.pools.shape[1]
    grads = torch.empty_like(gates)
    switch = top_k == 1 and grad_gates is not None
    again = switch or grad_log_z is not None or grad_probs is not None
    buffer = scored.buffer() if again else grads
    width = triton.next_power_of_2(pool)
    rows = max(1, min(scored.tiles.block, 8192 // width))  # they share their pool
    for part in scored.parts():
        scores = scored.score(buffer, part) if again else buffer
        _score_grads_kernel[(part[1] * scored.tiles.block // rows,)](
            gates, grads if grad_gates is None else grad_gates, scores,
            scored.tiles.rows, scored.tiles.cells, scored.token_ids, scored.pools,
            log_z if scored.inverse_norms is None else scored.inverse_norms,
            log_z, log_z if grad_log_z is None else grad_log_z, token_weights,
            log_z if grad_probs is None else grad_probs, grads, part[0],
            POOL=pool, WIDTH=width, BLOCK_T=scored.tiles.block, ROWS=rows,
            GATES=grad_gates is not None, LOG_Z=grad_log_z is not None,
            PROBS=grad_probs is not None, SWITCH=switch, NORMS=scored.inverse_norms is not None,
            num_warps=8 if width * rows >= 8192 else 4,
        )  # fmt: skip
    return grads


@triton.jit
def _probs_kernel(
    hidden, centroids, inverse_norms, row_keys, noise_std,
    offsets, token_ids, pools, log_z, token_weights, out,
    POOL: tl.constexpr, DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMS: tl.constexpr, NOISE: tl.constexpr, PRECISION: tl.constexpr,
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
        scores = score_tile(
            hidden, centroids, inverse_norms, row_keys, noise_std,
            tokens, row_mask, ids, place_mask,
            DIM, BLOCK_T, BLOCK_P, BLOCK_D, NORMS, NOISE, PRECISION,
        )  # fmt: skip
        weight = tl.load(token_weights + tokens, mask=row_mask, other=0.0)
        probs = tl.exp(scores - tl.load(log_z + rows, mask=row_mask, other=0.0)[:, None])
        total += tl.sum(tl.where(row_mask[:, None], probs * weight[:, None], 0.0), axis=0)
    tl.store(out + cell.to(tl.int64) * POOL + places, total, mask=place_mask)


def probs_per_entry(scored: Scored, log_z: Tensor, token_weights: Tensor) -> Tensor:
    """Weighted sum over each cell's rows of the softmax over their candidates: [G, M] float32."""
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
        scored.offsets, scored.token_ids, scored.pools, log_z, token_weights, out,
        POOL=pool, DIM=dim, BLOCK_T=scored.tiles.block, BLOCK_P=block_p, BLOCK_D=block_d,
        NORMS=scored.inverse_norms is not None, NOISE=noise is not None,
        PRECISION=dot_precision(scored.hidden.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _counts_kernel(
    gates, offsets, out, POOL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr
):
    cell = tl.program_id(1)
    places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    place_mask = places < POOL
    total = tl.zeros((BLOCK_T, BLOCK_P), tl.int32)
    first = tl.load(offsets + cell)
    last = tl.load(offsets + cell + 1)
    for start in range(first, last, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        gate = tl.load(
            gates + rows.to(tl.int64)[:, None] * POOL + places[None, :],
            mask=(rows < last)[:, None] & place_mask[None, :],
            other=0.0,
        )
        total += (gate > 0).to(tl.int32)
    tl.store(out + cell.to(tl.int64) * POOL + places, tl.sum(total, axis=0), mask=place_mask)


def counts_per_entry(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    """How many rows of each cell chose each of its experts: [G, M] int32."""
    pool = pools.shape[1]
    out = torch.empty(pools.shape, dtype=torch.int32, device=pools.device)
    block_p = max(16, min(triton.next_power_of_2(pool), 256))
    _counts_kernel[(triton.cdiv(pool, block_p), pools.shape[0])](
        gates, offsets, out, POOL=pool, BLOCK_T=16, BLOCK_P=block_p, num_warps=4
    )
    return out
