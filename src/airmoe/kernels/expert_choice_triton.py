"""Expert choice over cells without a sort: each expert takes its most probable tokens.

    keys     every candidate (token, expert) as one integer, written where its expert's are: first
             by probability, then by token, the lowest first
    bounds   an expert's last key that is taken, found bit by bit, counting the keys that reach it
    gates    probabilities of the pairs that reach their expert's bound

`expert_choice_gates` of the routers is the definition. An expert's candidates lie in many cells, so
all scores [N, M] and as many 64-bit keys exist at a time: 1.5 GiB for 65,536 tokens and M = 2048.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_scores import ScoreInputs
from airmoe.kernels.cell_scores_triton import all_scores
from airmoe.kernels.cells import CellLayout
from airmoe.kernels.device_triton import INFINITY
from airmoe.kernels.top_k_triton import smallest_gate

FLOAT_BITS = 30  # of a probability: the sign and, below 2, the bit after it are not set
ROW_BLOCK = 2048  # the paper's M: a row in one go
KEY_BLOCK = 512  # candidates of the mean expert at the paper's shape, in one warp's registers
# They change from batch to batch: none of them is worth a compilation of its own.
CHANGING = ["num_tokens", "token_bits", "steps"]


@triton.jit
def _key(prob, token, num_tokens, token_bits):
    """Larger where an expert prefers the token; 0 where the token cannot be taken."""
    bits = prob.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(prob > 0, (bits << token_bits) | (num_tokens - 1 - token), 0)


@triton.jit
def _owners(tile_cells, token_ids, row, BLOCK_T: tl.constexpr):
    """(cell, token) of this program's row."""
    cell = tl.load(tile_cells + tl.program_id(0) // BLOCK_T).to(tl.int64)
    return cell, tl.load(token_ids + row)


@triton.jit
def _log_z(scores, POOL: tl.constexpr, BLOCK: tl.constexpr):
    """logsumexp of a row that may be longer than a block: every lane keeps its own maximum."""
    peaks = tl.full((BLOCK,), -INFINITY, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, POOL, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        score = tl.load(scores + columns, mask=columns < POOL, other=-INFINITY)
        higher = tl.maximum(peaks, score)
        base = tl.where(higher > -INFINITY, higher, 0.0)
        totals = totals * tl.exp(peaks - base) + tl.exp(score - base)
        peaks = higher
    peak = tl.max(peaks, axis=0)
    peak = tl.where(peak > -INFINITY, peak, 0.0)
    return peak + tl.log(tl.sum(totals * tl.exp(peaks - peak), axis=0))


@triton.jit(do_not_specialize=CHANGING)
def _keys_kernel(
    scores, rows, tile_cells, token_ids, valid, offsets, firsts, probs, log_z, keys,
    num_tokens, token_bits,
    POOL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        cell, token = _owners(tile_cells, token_ids, row, BLOCK_T)
        counts = tl.load(valid + token) != 0
        total = tl.where(counts, _log_z(scores + row * POOL, POOL, BLOCK), 0.0)
        tl.store(log_z + row, total)
        place_in_cell = row - tl.load(offsets + cell)
        for start in range(0, POOL, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < POOL
            score = tl.load(scores + row * POOL + columns, mask=inside, other=-INFINITY)
            prob = tl.where(counts, tl.exp(score - total), 0.0)
            tl.store(probs + row * POOL + columns, prob, mask=inside)
            first = tl.load(firsts + cell * POOL + columns, mask=inside, other=0)
            key = _key(prob, token, num_tokens, token_bits)
            tl.store(keys + first + place_in_cell, key, mask=inside)


@triton.jit(do_not_specialize=CHANGING)
def _bounds_kernel(keys, starts, capacity, bounds, steps, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    first = tl.load(starts + expert)
    last = tl.load(starts + expert + 1)
    wanted = tl.load(capacity)
    bound = tl.zeros((), tl.int64)
    if last - first > wanted:  # else all are taken
        for step in range(0, steps):
            higher = bound | (tl.full((), 1, tl.int64) << (steps - 1 - step))
            reach = tl.zeros((BLOCK,), tl.int32)
            for start in range(first, last, BLOCK):
                places = start + tl.arange(0, BLOCK)
                key = tl.load(keys + places, mask=places < last, other=0)
                reach += (key >= higher).to(tl.int32)
            bound = tl.where(tl.sum(reach, axis=0) >= wanted, higher, bound)
    tl.store(bounds + expert, tl.maximum(bound, 1))


@triton.jit(do_not_specialize=CHANGING)
def _gates_kernel(
    probs, rows, tile_cells, token_ids, pools, bounds, gates, num_tokens, token_bits, least,
    POOL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        cell, token = _owners(tile_cells, token_ids, row, BLOCK_T)
        for start in range(0, POOL, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < POOL
            prob = tl.load(probs + row * POOL + columns, mask=inside, other=0.0)
            expert = tl.load(pools + cell * POOL + columns, mask=inside, other=0)
            bound = tl.load(bounds + expert, mask=inside, other=1)
            taken = _key(prob, token, num_tokens, token_bits) >= bound
            # A chosen gate never underflows to 0, because 0 means "not chosen"; NaN must show.
            gate = tl.where(taken, tl.maximum(prob, least), 0.0)
            gate = tl.where(prob == prob, gate, prob)
            tl.store(gates + row * POOL + columns, gate.to(gates.dtype.element_ty), mask=inside)


def gates_of_experts_choice(
    scored: ScoreInputs, valid: Tensor, capacity: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gates, log Z and scores as for token choice; each expert takes its `capacity` (0-dim) most
    probable tokens."""
    layout, tiles, pool = scored.layout, scored.layout.tiles, scored.layout.pool_width
    num_tokens = valid.shape[0]
    scores = all_scores(scored)
    kept = scores if scored.kept else None
    probs = scores if kept is None else torch.empty_like(scores)
    gates = torch.empty(scores.shape, dtype=scored.hidden.dtype, device=scores.device)
    log_z = torch.empty(scores.shape[0], dtype=torch.float32, device=scores.device)
    if scores.numel() == 0:
        return gates, log_z, kept
    firsts, starts = _places(layout, scored.centroids.shape[0])
    keys = torch.empty(scores.numel(), dtype=torch.int64, device=scores.device)
    bounds = torch.empty(starts.shape[0] - 1, dtype=torch.int64, device=scores.device)
    token_bits = max(1, (num_tokens - 1).bit_length())
    block = min(ROW_BLOCK, triton.next_power_of_2(pool))
    form = {"POOL": pool, "BLOCK_T": tiles.block, "BLOCK": block, "num_warps": 4}
    grid = (tiles.rows.numel(),)
    _keys_kernel[grid](
        scores, tiles.rows, tiles.cells, layout.token_ids, valid, layout.offsets, firsts, probs,
        log_z, keys, num_tokens, token_bits, **form,
    )  # fmt: skip
    _bounds_kernel[(bounds.shape[0],)](
        keys, starts, capacity, bounds, FLOAT_BITS + token_bits, BLOCK=KEY_BLOCK, num_warps=1
    )
    _gates_kernel[grid](
        probs, tiles.rows, tiles.cells, layout.token_ids, layout.pools, bounds, gates, num_tokens,
        token_bits, smallest_gate(gates.dtype), **form,
    )  # fmt: skip
    return gates, log_z, kept


def _places(layout: CellLayout, num_experts: int) -> tuple[Tensor, Tensor]:
    """Candidates ordered by expert: where those of each entry of the pools begin [G * M], and those
    of each expert [E + 1]."""
    reverse = layout.reverse_index(num_experts)
    entries = reverse.entries.long()
    sizes = layout.offsets.diff()[entries.div(layout.pool_width, rounding_mode="floor")]  # [G * M]
    ends = sizes.cumsum(0)
    firsts = torch.empty_like(ends).scatter_(0, entries, ends - sizes)
    starts = torch.nn.functional.pad(ends, (1, 0))[reverse.starts.long()]
    return firsts, starts
