"""Scores, selection and gates of cells without keeping the scores, and the backward of all of it.

Scores are float32. Of products in lower precision they exist for a few tiles of rows at a time (for
all rows where experts choose, see `expert_choice_triton`); what is kept are the gates and the
softmax denominators, from which the backward goes on (it scores again where a statistic needs it).
Scores of float32 products are kept: making them again costs far more than reading them, and they
are no wider than the gates.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_scores.triton import launch_scores
from airmoe.kernels.cells.tiles import RowTiles
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

    @property
    def keeps_scores(self) -> bool:
        return self.hidden.dtype == torch.float32

    def all_scores(self) -> Tensor:
        """[N, M] float32."""
        shape = (self.token_ids.shape[0], self.pools.shape[1])
        scores = torch.empty(shape, dtype=torch.float32, device=self.hidden.device)
        self._launch(scores, None)
        return scores

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
        self._launch(buffer, part)
        return buffer[: part[1] * self.tiles.block]

    def _launch(self, scores: Tensor, part: tuple[int, int] | None) -> None:
        launch_scores(
            self.hidden,
            self.centroids,
            self.inverse_norms,
            self.noise,
            self.tiles,
            self.offsets,
            self.token_ids,
            self.pools,
            scores,
            part=part,
        )

    def rows(self, part: tuple[int, int]) -> Tensor:
        """[rows of a piece] row numbers, -1 = none."""
        block = self.tiles.block
        return self.tiles.rows[part[0] * block : (part[0] + part[1]) * block]


def make_gates(scored: Scored, valid: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gates [N, M] in the dtype of hidden, log of the softmax denominator over all M [N], and the
    scores [N, M] where they are kept."""
    num_rows, pool = scored.token_ids.shape[0], scored.pools.shape[1]
    gates = torch.empty(num_rows, pool, dtype=scored.hidden.dtype, device=valid.device)
    log_z = torch.empty(num_rows, dtype=torch.float32, device=valid.device)
    row_valid = valid[scored.token_ids]
    if scored.keeps_scores:
        scores = scored.all_scores()
        gates_from_scores(scores, None, row_valid, top_k, gates, log_z)
        return gates, log_z, scores
    buffer = scored.buffer()
    for part in scored.parts():
        scores = scored.score(buffer, part)
        gates_from_scores(scores, scored.rows(part), row_valid, top_k, gates, log_z)
    return gates, log_z, None


@triton.jit
def _score_grads_kernel(
    gates, grad_gates, scores, rows, tile_cells, token_ids, pools, inverse_norms,
    log_z, grad_log_z, valid, grad_probs, grad_scores, first_tile,
    POOL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
    GATES: tl.constexpr, LOG_Z: tl.constexpr, PROBS: tl.constexpr,
    OVER_ALL: tl.constexpr, NORMS: tl.constexpr, KEPT: tl.constexpr,
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
        if OVER_ALL or LOG_Z or PROBS:
            if KEPT:
                score = tl.load(scores + at, mask=mask, other=0.0)
            else:
                buffer = places.to(tl.int64)[:, None] * POOL + columns[None, :]
                score = tl.load(scores + buffer, mask=mask, other=0.0)
            row_log_z = tl.load(log_z + row, mask=used, other=0.0)
            probs = tl.where(mask, tl.exp(score - row_log_z[:, None]), 0.0)
        if GATES:
            gate = tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)
            weighted = gate * tl.load(grad_gates + at, mask=mask, other=0.0).to(tl.float32)
            total = tl.sum(weighted, axis=1)[:, None]
            if OVER_ALL:
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
            counts = tl.load(valid + tokens, mask=used, other=0).to(tl.float32)[:, None]
            wanted = tl.load(grad_probs + ids, mask=column_mask, other=0.0)[None, :]
            grad += counts * probs * (wanted - tl.sum(probs * wanted, axis=1)[:, None])
        if NORMS:  # of the row's own centroid: what comes next multiplies by w, not by w / |w|
            grad *= tl.load(inverse_norms + ids, mask=column_mask, other=0.0)[None, :]
        tl.store(grad_scores + at, grad.to(grad_scores.dtype.element_ty), mask=mask)


def score_grads(
    scored: Scored,
    gates: Tensor,
    log_z: Tensor,
    valid: Tensor,
    kept: Tensor | None,
    grad_gates: Tensor | None,
    grad_log_z: Tensor | None,
    grad_probs: Tensor | None,
    *,
    over_all: bool,
) -> Tensor:
    """Gradient of the scores, which may have been kept, times 1/|w|: [N, M] in hidden's dtype.

    `over_all`: gates are probabilities among all M candidates, not among those that were chosen.
    """
    pool = scored.pools.shape[1]
    grads = torch.empty_like(gates)
    over_all = over_all and grad_gates is not None
    needed = over_all or grad_log_z is not None or grad_probs is not None
    again = needed and kept is None
    buffer = scored.buffer() if again else grads if kept is None else kept
    width = triton.next_power_of_2(pool)
    # A few rows share their pool; not too many where scores fill the registers as well.
    rows = max(1, min(scored.tiles.block, (4096 if needed else 8192) // width))
    for part in scored.parts() if again else [(0, scored.tiles.count)]:
        scores = scored.score(buffer, part) if again else buffer
        _score_grads_kernel[(part[1] * scored.tiles.block // rows,)](
            gates, grads if grad_gates is None else grad_gates, scores,
            scored.tiles.rows, scored.tiles.cells, scored.token_ids, scored.pools,
            log_z if scored.inverse_norms is None else scored.inverse_norms,
            log_z, log_z if grad_log_z is None else grad_log_z, valid,
            log_z if grad_probs is None else grad_probs, grads, part[0],
            POOL=pool, WIDTH=width, BLOCK_T=scored.tiles.block, ROWS=rows,
            GATES=grad_gates is not None, LOG_Z=grad_log_z is not None,
            PROBS=grad_probs is not None, OVER_ALL=over_all, NORMS=scored.inverse_norms is not None,
            KEPT=not again, num_warps=8 if width * rows >= 4096 else 4,
        )  # fmt: skip
    return grads
