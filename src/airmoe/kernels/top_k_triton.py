"""Exact top-K without a sort, and the gates over what was chosen.

A row stays in registers, and the K-th largest score is found by halving the interval between its
least and greatest score, counting after each step, until exactly K scores reach the middle: about
log2(n) + 1 steps of two instructions per score. Only a row with equal scores at the border goes on
to find which of them come first.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.device_triton import INFINITY, finite_from_above, largest

FEW_ROWS = 128  # a GPU has more warps than one for each
MAX_REGISTERS = 128  # 16 warps on an SM; without a limit the compiler takes 200


def row_warps(block: int, rows: int) -> int:
    """Warps for each of some rows of `block` scores: one up to 2048, so that counting needs no
    barrier; up to four times as many where there are few rows."""
    return max(1, min(16, block // (512 if rows <= FEW_ROWS else 2048)))


@triton.jit
def _write_gates(
    scores_ptr, gates_ptr, log_z_ptr, columns, count, least,
    FULL_SOFTMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position = tl.arange(0, BLOCK)
    inside = position < columns
    given = tl.load(scores_ptr + position, mask=inside, other=-INFINITY).to(tl.float32)
    # Choosing needs an order of all scores; what comes out of a row with NaN must show it.
    spoilt = tl.max((given != given).to(tl.int32), axis=0) > 0
    scores = finite_from_above(given)
    threshold, last = largest(scores, position, columns, count, BLOCK)
    chosen = (scores > threshold) | ((scores == threshold) & (position <= last))
    peak = tl.max(scores, axis=0)
    peak = tl.where(peak > -INFINITY, peak, 0.0)
    powers = tl.exp(scores - peak)
    total = tl.sum(powers, axis=0)
    tl.store(log_z_ptr, tl.where(spoilt, float("nan"), peak + tl.log(total)))
    kept = tl.where(chosen, powers, 0.0)
    if not FULL_SOFTMAX:
        total = tl.sum(kept, axis=0)
    # A chosen gate never underflows to 0, because 0 means "not chosen".
    weights = tl.where(spoilt, float("nan"), tl.maximum(kept * (1.0 / total), least))
    gates = tl.where(chosen, weights, 0.0)
    tl.store(gates_ptr + position, gates.to(gates_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gates_kernel(
    scores_ptr, row_ids_ptr, valid_ptr, token_ids_ptr, gates_ptr, log_z_ptr, columns, count, least,
    FULL_SOFTMAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = place if row_ids_ptr is None else tl.load(row_ids_ptr + place).to(tl.int64)
    if row >= 0:
        token = row if token_ids_ptr is None else tl.load(token_ids_ptr + row)
        if tl.load(valid_ptr + token):
            _write_gates(
                scores_ptr + place * columns, gates_ptr + row * columns, log_z_ptr + row,
                columns, count, least, FULL_SOFTMAX, BLOCK,
            )  # fmt: skip
        else:
            position = tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), dtype=gates_ptr.dtype.element_ty)
            tl.store(gates_ptr + row * columns + position, zeros, mask=position < columns)
            tl.store(log_z_ptr + row, 0.0)


@triton.jit
def _grads_kernel(
    grad_gates_ptr, gates_ptr, scores_ptr, grad_scores_ptr, columns, BLOCK: tl.constexpr
):  # fmt: skip
    position = tl.arange(0, BLOCK)
    inside = position < columns
    at = tl.program_id(0).to(tl.int64) * columns + position
    gates = tl.load(gates_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weighted = gates * tl.load(grad_gates_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(weighted, axis=0)
    # Stored gates are rounded and do not add up to 1. Where one has nearly all, its gradient is a
    # small difference that this would drown.
    sums = tl.sum(gates, axis=0)
    probs = gates / tl.where(sums > 0, sums, 1.0)
    if scores_ptr is not None:
        scores = tl.load(scores_ptr + at, mask=inside, other=-INFINITY).to(tl.float32)
        peak = tl.max(scores, axis=0)
        powers = tl.exp(scores - tl.where(peak > -INFINITY, peak, 0.0))
        probs = powers / tl.sum(powers, axis=0)
    # A row without gates has no gradient, even where its own softmax is not a number.
    grads = tl.where(total == 0, weighted, weighted - probs * total)
    tl.store(grad_scores_ptr + at, grads.to(grad_scores_ptr.dtype.element_ty), mask=inside)


def smallest_gate(dtype: torch.dtype) -> float:
    """What a chosen gate is at least, so that it is not 0 in this dtype.

    float16 has few exponents: its smallest normal number, 6e-5, would distort a softmax over
    hundreds, so there it is the smallest number of all.
    """
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny


def top_k_gates(scores: Tensor, valid: Tensor, count: int) -> Tensor:
    """scores [R, n], valid [R] -> gates [R, n]."""
    scores = scores.contiguous()
    gates = torch.empty_like(scores)
    log_z = torch.empty(scores.shape[0], dtype=torch.float32, device=scores.device)
    gates_from_scores(scores, valid.contiguous(), count, gates, log_z)
    return gates


def gates_from_scores(
    scores: Tensor,
    valid: Tensor,
    count: int,
    gates: Tensor,
    log_z: Tensor,
    *,
    row_ids: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> None:
    """Write the gates and log Z of the rows whose scores [R, n] stand in a buffer.

    Rows are at most `LONGEST_ROW` long. Row i of the buffer belongs to row `row_ids[i]` of gates
    [N, n] and log_z [N] (-1: to none; without `row_ids` to row i), and row j of these to token
    `token_ids[j]` of valid (without `token_ids` to token j). `log_z` is over all n candidates, 0
    for rows that are not valid.
    """
    rows, columns = scores.shape
    block = triton.next_power_of_2(columns)
    _gates_kernel[(rows,)](
        scores, row_ids, valid, token_ids, gates, log_z, columns, count, smallest_gate(gates.dtype),
        FULL_SOFTMAX=count == 1, BLOCK=block,
        num_warps=row_warps(block, rows), maxnreg=MAX_REGISTERS,
    )  # fmt: skip


def top_k_gates_backward(grad_gates: Tensor, gates: Tensor, scores: Tensor | None) -> Tensor:
    """Gradient of the scores; they are needed where the gate is the full-softmax probability."""
    (rows, columns), grad_scores = gates.shape, torch.empty_like(gates)
    block = triton.next_power_of_2(columns)
    _grads_kernel[(rows,)](
        grad_gates.contiguous(), gates, scores, grad_scores, columns,
        BLOCK=block, num_warps=max(1, min(16, block // 1024)),
    )  # fmt: skip
    return grad_scores
