"""Scores, selection and gates of cells without keeping the scores, and the backward of all of it.

Scores are float32. Of products in lower precision they exist for a few tiles of rows at a time (for
all rows where experts choose, see `expert_choice_triton`); what is kept are the gates and the
softmax denominators, from which the backward goes on (it scores again where a statistic needs it).
Where making the scores again costs far more than reading them (float32 products), or where there
are few, they are kept.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import chunks
from airmoe.kernels.cell_scores import ScoreInputs
from airmoe.kernels.cell_scores_triton import (
    all_scores,
    operand_gradients,
    score_tile,
    write_scores,
)
from airmoe.kernels.device_triton import (
    block_size,
    dot_precision,
    load_rows,
    part_of_pool,
    store_rows,
)
from airmoe.kernels.expert_choice_triton import gates_of_experts_choice
from airmoe.kernels.top_k_triton import gates_from_scores

BUFFER_ELEMENTS = 1 << 25  # scores that exist at once
GROUP = 16  # rows of a cell for which one program gathers what belongs to their experts


def score_pieces(scored: ScoreInputs) -> Iterator[tuple[slice, Tensor]]:
    """Runs of tiles, and the scores [rows, M] of each in a buffer that is used again.

    Rows that belong to no token are not written.
    """
    tiles, pool = scored.layout.tiles, scored.layout.pool_width
    step = max(1, min(BUFFER_ELEMENTS // (tiles.block * pool), tiles.count))
    shape = (step * tiles.block, pool)
    buffer = torch.empty(shape, dtype=torch.float32, device=scored.hidden.device)
    for part in chunks(tiles.count, step):
        write_scores(scored, buffer, part)
        yield part, buffer[: (part.stop - part.start) * tiles.block]


def cell_gates(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gates, log Z, `probs` and the scores where they are kept, else nothing."""
    scored, (valid, top_k, capacity, carry_probs) = ScoreInputs.of(*operands), operands[-4:]
    if top_k is not None:
        gates, log_z, scores = _gates_of_tokens_choice(scored, valid, top_k)
    else:
        gates, log_z, scores = gates_of_experts_choice(scored, valid, capacity)
    probs = log_z.new_zeros(scored.centroids.shape[0] if carry_probs else 0)
    return gates, log_z, probs, log_z.new_empty(0) if scores is None else scores


def _gates_of_tokens_choice(
    scored: ScoreInputs, valid: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gates [N, M] in the dtype of hidden, log of the softmax denominator over all M [N], and the
    scores [N, M] where they are kept."""
    layout = scored.layout
    shape = (layout.num_rows, layout.pool_width)
    gates = torch.empty(shape, dtype=scored.hidden.dtype, device=valid.device)
    log_z = torch.empty(shape[0], dtype=torch.float32, device=valid.device)
    tokens = layout.token_ids
    if scored.kept:
        scores = all_scores(scored)
        gates_from_scores(scores, valid, top_k, gates, log_z, token_ids=tokens)
        return gates, log_z, scores
    for part, scores in score_pieces(scored):
        rows = layout.tiles.rows[part].flatten()  # -1 = none
        gates_from_scores(scores, valid, top_k, gates, log_z, row_ids=rows, token_ids=tokens)
    return gates, log_z, None


@triton.jit
def _score_grads_kernel(
    gates, grad_gates, scores, rows, tile_cells, token_ids, pools, inverse_norms,
    log_z, grad_log_z, valid, grad_probs, grad_scores, first_tile,
    POOL: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, OVER_ALL: tl.constexpr, KEPT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * GROUP  # of some rows of one tile, which share what is gathered
    own = tl.load(rows + first_tile * BLOCK_T + first + tl.arange(0, GROUP))
    number = tl.sum((own >= 0).to(tl.int32), axis=0)
    if number > 0:
        cell = tl.load(tile_cells + first_tile + first // BLOCK_T).to(tl.int64)
        columns = tl.arange(0, WIDTH)
        column_mask = columns < POOL
        if grad_probs is not None or inverse_norms is not None:
            ids = tl.load(pools + cell * POOL + columns, mask=column_mask, other=0)
        if grad_probs is not None:
            wanted = tl.load(grad_probs + ids, mask=column_mask, other=0.0)[None, :]
        if inverse_norms is not None:
            norms = tl.load(inverse_norms + ids, mask=column_mask, other=0.0)[None, :]
        for start in tl.range(0, number, ROWS, num_stages=STAGES):
            places = first + start + tl.arange(0, ROWS)
            used = start + tl.arange(0, ROWS) < number
            row = tl.load(rows + first_tile * BLOCK_T + places, mask=used, other=0)
            grad = tl.zeros((ROWS, WIDTH), tl.float32)
            if scores is not None:
                score = load_rows(scores, row if KEPT else places, used, columns, POOL)
                row_log_z = tl.load(log_z + row, mask=used, other=0.0)
                probs = tl.exp(score - row_log_z[:, None])
                probs = tl.where(used[:, None] & column_mask[None, :], probs, 0.0)
            if grad_gates is not None:
                gate = load_rows(gates, row, used, columns, POOL).to(tl.float32)
                weighted = gate * load_rows(grad_gates, row, used, columns, POOL).to(tl.float32)
                total = tl.sum(weighted, axis=1)[:, None]
                if OVER_ALL:
                    grad = weighted - probs * total
                else:
                    # Stored gates are rounded and do not add up to 1. Where one has nearly all, its
                    # gradient is a small difference that this would drown.
                    sums = tl.sum(gate, axis=1)[:, None]
                    grad = weighted - gate * (total / tl.where(sums > 0, sums, 1.0))
            if grad_log_z is not None:
                grad += probs * tl.load(grad_log_z + row, mask=used, other=0.0)[:, None]
            if grad_probs is not None:
                tokens = tl.load(token_ids + row, mask=used, other=0)
                counts = tl.load(valid + tokens, mask=used, other=0).to(tl.float32)[:, None]
                grad += counts * probs * (wanted - tl.sum(probs * wanted, axis=1)[:, None])
            # Of the row's own centroid: what comes next multiplies by w, not by w / |w|.
            if inverse_norms is not None:
                grad *= norms
            store_rows(grad_scores, row, used, columns, grad, POOL)


def _score_grads(scored: ScoreInputs, call: Any) -> Tensor:
    """Gradient of the scores times 1/|w|: [N, M] in hidden's dtype."""
    layout, tiles, pool = scored.layout, scored.layout.tiles, scored.layout.pool_width
    grad_gates, grad_log_z, grad_probs = call.grad_gates, call.grad_log_z, call.grad_probs
    grads = torch.empty_like(call.gates)
    # Where experts choose, and for K = 1, gates are probabilities among all M candidates.
    over_all = call.top_k in (1, None) and grad_gates is not None
    needed = over_all or grad_log_z is not None or grad_probs is not None
    again = needed and not scored.kept
    whole = slice(0, tiles.count), call.scores if needed else None
    width = triton.next_power_of_2(pool)
    group, rows = min(tiles.block, GROUP), max(1, min(GROUP, 4096 // width))
    for part, scores in score_pieces(scored) if again else [whole]:
        _score_grads_kernel[((part.stop - part.start) * tiles.block // group,)](
            call.gates, grad_gates, scores, tiles.rows, tiles.cells, layout.token_ids,
            layout.pools, scored.inverse_norms, call.log_z, grad_log_z, call.valid, grad_probs,
            grads, part.start,
            POOL=pool, WIDTH=width, BLOCK_T=tiles.block, GROUP=group, ROWS=rows,
            OVER_ALL=over_all, KEPT=not again, STAGES=1,
            num_warps=8 if width * rows >= 4096 else 4,
        )  # fmt: skip
    return grads


def cell_gates_backward(call: Any, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of the wanted of hidden and centroids."""
    scored = ScoreInputs.of(*call.inputs)
    return operand_gradients(scored, _score_grads(scored, call), wanted)


@triton.jit
def _probs_kernel(
    hidden, centroids, inverse_norms, row_keys, noise_std, kept,
    offsets, token_ids, pools, log_z, valid, out,
    POOL: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(1)
    part = tl.program_id(0) * BLOCK_P
    places, place_mask, ids = part_of_pool(pools, cell, part, POOL, BLOCK_P)
    # Rows are added up at the end, where a product leaves registers for that.
    total = tl.zeros((1 if kept is None else BLOCK_T, BLOCK_P), tl.float32)
    first = tl.load(offsets + cell)
    last = tl.load(offsets + cell + 1)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_T)
        row_mask = rows < last
        tokens = tl.load(token_ids + rows, mask=row_mask, other=0)
        if kept is not None:
            scores = load_rows(kept, rows, row_mask, places, POOL)
        else:
            scores = score_tile(
                hidden, centroids, inverse_norms, row_keys, noise_std,
                tokens, row_mask, ids, place_mask,
                DIM, BLOCK_T, BLOCK_P, BLOCK_D, PRECISION,
            )  # fmt: skip
        counts = tl.load(valid + tokens, mask=row_mask, other=0) != 0
        probs = tl.exp(scores - tl.load(log_z + rows, mask=row_mask, other=0.0)[:, None])
        probs = tl.where(counts[:, None], probs, 0.0)
        total += probs if kept is not None else tl.sum(probs, axis=0)[None, :]
    total = tl.sum(total, axis=0)
    tl.store(out + cell.to(tl.int64) * POOL + places, total, mask=place_mask)


def probs_per_entry(*operands: Any) -> Tensor:
    """Sum over each cell's valid rows of the softmax over their candidates: [G, M] float32.

    The scores are empty where they were not kept.
    """
    scored, (scores, log_z, valid) = ScoreInputs.of(*operands), operands[-3:]
    layout = scored.layout
    dim, pool = scored.hidden.shape[1], layout.pool_width
    out = torch.empty(layout.pools.shape, dtype=torch.float32, device=log_z.device)
    wide = scored.hidden.dtype == torch.float32
    block_t = 16 if scored.kept else layout.tiles.block
    block_p = block_size(pool, 64 if wide or scored.kept else 128)
    block_d = block_size(dim, 32 if wide else 64)
    _probs_kernel[(triton.cdiv(pool, block_p), layout.pools.shape[0])](
        scored.hidden, scored.centroids, scored.inverse_norms, scored.row_keys, scored.noise_std,
        scores if scored.kept else None,
        layout.offsets, layout.token_ids, layout.pools, log_z, valid, out,
        POOL=pool, DIM=dim, BLOCK_T=block_t, BLOCK_P=block_p, BLOCK_D=block_d,
        PRECISION=dot_precision(scored.hidden.dtype), STAGES=3 if scored.kept else None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
