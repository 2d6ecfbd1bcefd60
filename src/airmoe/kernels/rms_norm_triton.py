"""RMS norm and the addition before it: whole rows at a time, each number read and written once."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.device_triton import load_rows, store_rows
from airmoe.kernels.rms_norm import ROWS_PER_SUM, empty_gradients, empty_sum_and_norm

FORWARD_TILE = 2048  # entries that a program holds of each operand
BACKWARD_TILE = 1024


@triton.jit
def _forward_kernel(
    hidden, delta, weight, summed, normed, scales, num_rows, eps,
    DIM: tl.constexpr, ADDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_D)
    real = row < num_rows
    values = load_rows(hidden, row, real, column, DIM)
    if ADDS:
        values = values.to(tl.float32) + load_rows(delta, row, real, column, DIM).to(tl.float32)
        values = values.to(summed.dtype.element_ty)
        store_rows(summed, row, real, column, values, DIM)
    exact = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=1) / DIM + eps)
    unit = (exact * scale[:, None]).to(values.dtype).to(tl.float32)
    weights = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    store_rows(normed, row, real, column, unit * weights[None, :], DIM)
    tl.store(scales + row, scale, mask=real)


@triton.jit
def _backward_kernel(
    grad_normed, grad_summed, summed, scales, weight, grad_hidden, grad_delta, weight_sums,
    num_rows,
    DIM: tl.constexpr, ADDS: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    weights = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(0, ROWS, BLOCK_R):
        row = tl.program_id(0) * ROWS + start + tl.arange(0, BLOCK_R)
        real = row < num_rows
        scale = tl.load(scales + row, mask=real, other=0.0)[:, None]
        unit = load_rows(summed, row, real, column, DIM).to(tl.float32) * scale
        grad = load_rows(grad_normed, row, real, column, DIM).to(tl.float32)
        sums += grad * unit
        grad *= weights
        grad = (grad - unit * (tl.sum(grad * unit, axis=1) / DIM)[:, None]) * scale
        if ADDS:
            grad += load_rows(grad_summed, row, real, column, DIM).to(tl.float32)
        store_rows(grad_hidden, row, real, column, grad, DIM)
        if APART:
            store_rows(grad_delta, row, real, column, grad, DIM)
    place = weight_sums + tl.program_id(0).to(tl.int64) * DIM + column
    tl.store(place, tl.sum(sums, axis=0), mask=column < DIM)


def _block(dim: int, tile: int) -> tuple[dict[str, Any], Any]:
    """The sizes of a tile of whole rows, and the warps for it."""
    block_d = triton.next_power_of_2(dim)
    block_r = min(ROWS_PER_SUM, max(1, tile // block_d))
    return {"BLOCK_R": block_r, "BLOCK_D": block_d}, min(16, max(tile, block_d) // 512)


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden + delta, or nothing without a delta; its norm in `dtype`; its scales [..])."""
    dim, num_rows = weight.shape[0], hidden.shape[:-1].numel()
    delta = None if delta is None else delta.contiguous()
    summed, normed, scales = empty_sum_and_norm(hidden, delta, weight, eps, dtype)
    blocks, warps = _block(dim, FORWARD_TILE)
    _forward_kernel[(triton.cdiv(num_rows, blocks["BLOCK_R"]),)](
        hidden.contiguous(), delta, weight.contiguous(), summed, normed, scales, num_rows, eps,
        DIM=dim, ADDS=delta is not None, **blocks, num_warps=warps,
    )  # fmt: skip
    return summed, normed, scales


def add_rms_norm_backward(
    grad_normed: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    scales: Tensor,
    weight: Tensor,
    delta_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the stream, the same in `delta_dtype` if that is another, sums [.., D])."""
    dim, num_rows = weight.shape[0], scales.numel()
    found = empty_gradients(grad_normed, grad_summed, summed, scales, weight, delta_dtype)
    grad_hidden, grad_delta, sums = found
    blocks, warps = _block(dim, BACKWARD_TILE)
    _backward_kernel[(sums.shape[0],)](
        grad_normed.contiguous(), None if grad_summed is None else grad_summed.contiguous(),
        summed.contiguous(), scales, weight.contiguous(), grad_hidden, grad_delta, sums, num_rows,
        DIM=dim, ADDS=grad_summed is not None, APART=grad_delta.numel() > 0, ROWS=ROWS_PER_SUM,
        **blocks, num_warps=warps,
    )  # fmt: skip
    return found
