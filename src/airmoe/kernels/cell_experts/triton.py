"""Experts of a cell as grouped products over its pool, rows of the tables fetched by index.

Forward: pre-activations and activation in one kernel, the down product in another (the [N, neurons]
activations between them are the only large buffer; a fused form would not fit wide models).
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_experts.activations_triton import (
    ACTIVATION_CODES,
    activate,
    activation_grads,
)
from airmoe.kernels.cells.dot_triton import dot_precision
from airmoe.kernels.cells.tiles import RowTiles


@dataclass(frozen=True)
class Layout:
    """Rows by cell, and the neurons of each cell."""

    tiles: RowTiles
    offsets: Tensor  # [G + 1]
    token_ids: Tensor  # [N]
    neurons: Tensor  # [G, M * expert_size] rows of the tables


@triton.jit
def _activations_kernel(
    hidden, gate_table, up_table, gates, pre_gate, pre_up, active,
    tile_cells, tile_first, offsets, token_ids, neurons,
    gates_row, gates_column,
    NEURONS: tl.constexpr, DIM: tl.constexpr, EXPERT_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        rows = tl.load(tile_first + tile) + tl.arange(0, BLOCK_T)
        row_mask = rows < tl.load(offsets + cell + 1)
        tokens = tl.load(token_ids + rows, mask=row_mask, other=0).to(tl.int64)
        places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        place_mask = places < NEURONS
        ids = tl.load(neurons + cell.to(tl.int64) * NEURONS + places, mask=place_mask, other=0)
        ids = ids.to(tl.int64)
        up = tl.zeros((BLOCK_P, BLOCK_T), tl.float32)
        gate = up
        for start in range(0, DIM, BLOCK_D):
            columns = start + tl.arange(0, BLOCK_D)
            column_mask = columns < DIM
            states = tl.load(
                hidden + tokens[:, None] * DIM + columns[None, :],
                mask=row_mask[:, None] & column_mask[None, :],
                other=0.0,
            )
            entries = ids[:, None] * DIM + columns[None, :]
            mask = place_mask[:, None] & column_mask[None, :]
            up_rows = tl.load(up_table + entries, mask=mask, other=0.0)
            up = tl.dot(up_rows, tl.trans(states), up, input_precision=PRECISION)
            if GATED:
                gate_rows = tl.load(gate_table + entries, mask=mask, other=0.0)
                gate = tl.dot(gate_rows, tl.trans(states), gate, input_precision=PRECISION)
        up = tl.trans(up)
        gate = tl.trans(gate)
        mask = row_mask[:, None] & place_mask[None, :]
        place = rows.to(tl.int64)[:, None] * NEURONS + places[None, :]
        weight = tl.load(
            gates
            + rows.to(tl.int64)[:, None] * gates_row
            + (places // EXPERT_SIZE)[None, :] * gates_column,
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        # Experts that were not chosen add nothing, even if they overflow: act(0) is 0.
        up = tl.where(weight == 0.0, 0.0, up)
        gate = tl.where(weight == 0.0, 0.0, gate)
        if KEEP:
            tl.store(pre_up + place, up.to(pre_up.dtype.element_ty), mask=mask)
            if GATED:
                tl.store(pre_gate + place, gate.to(pre_gate.dtype.element_ty), mask=mask)
        exact: tl.constexpr = active.dtype.element_ty == tl.float32
        value = activate(up, gate, ACTIVATION, exact) * weight
        tl.store(active + place, value.to(active.dtype.element_ty), mask=mask)


@triton.jit
def _activation_grads_kernel(
    grad_output, down_table, gates, pre_gate, pre_up,
    active, grad_gates, grad_gate, grad_up,
    tile_cells, tile_first, offsets, token_ids, neurons,
    gates_row, gates_column,
    NEURONS: tl.constexpr, DIM: tl.constexpr, EXPERT_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        rows = tl.load(tile_first + tile) + tl.arange(0, BLOCK_T)
        row_mask = rows < tl.load(offsets + cell + 1)
        tokens = tl.load(token_ids + rows, mask=row_mask, other=0).to(tl.int64)
        places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        place_mask = places < NEURONS
        ids = tl.load(neurons + cell.to(tl.int64) * NEURONS + places, mask=place_mask, other=0)
        ids = ids.to(tl.int64)
        grad = tl.zeros((BLOCK_P, BLOCK_T), tl.float32)
        for start in range(0, DIM, BLOCK_D):
            columns = start + tl.arange(0, BLOCK_D)
            column_mask = columns < DIM
            upstream = tl.load(
                grad_output + tokens[:, None] * DIM + columns[None, :],
                mask=row_mask[:, None] & column_mask[None, :],
                other=0.0,
            )
            down_rows = tl.load(
                down_table + ids[:, None] * DIM + columns[None, :],
                mask=place_mask[:, None] & column_mask[None, :],
                other=0.0,
            )
            grad = tl.dot(down_rows, tl.trans(upstream), grad, input_precision=PRECISION)
        grad = tl.trans(grad)
        mask = row_mask[:, None] & place_mask[None, :]
        place = rows.to(tl.int64)[:, None] * NEURONS + places[None, :]
        weight = tl.load(
            gates
            + rows.to(tl.int64)[:, None] * gates_row
            + (places // EXPERT_SIZE)[None, :] * gates_column,
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        grad = tl.where(weight == 0.0, 0.0, grad)  # `up` and `gate` are 0 there already
        up = tl.load(pre_up + place, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(pre_gate + place, mask=mask, other=0.0).to(tl.float32)
        else:
            gate = up
        exact: tl.constexpr = active.dtype.element_ty == tl.float32
        value, value_up, value_gate = activation_grads(up, gate, grad * weight, ACTIVATION, exact)
        tl.store(active + place, (value * weight).to(active.dtype.element_ty), mask=mask)
        tl.store(grad_gates + place, (value * grad).to(grad_gates.dtype.element_ty), mask=mask)
        tl.store(grad_up + place, value_up.to(grad_up.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(grad_gate + place, value_gate.to(grad_gate.dtype.element_ty), mask=mask)


def _blocks(dim: int, neurons: int, dtype: torch.dtype) -> dict[str, int]:
    wide = dtype == torch.float32
    return {
        "BLOCK_P": max(16, min(triton.next_power_of_2(neurons), 64)),
        "BLOCK_D": max(16, min(triton.next_power_of_2(dim), 32 if wide else 64)),
    }


@dataclass(frozen=True)
class Activations:
    """[N, neurons] each; the pre-activations only where they are kept for a backward."""

    active: Tensor
    pre_gate: Tensor | None
    pre_up: Tensor | None


def activations(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    gates: Tensor,
    layout: Layout,
    *,
    activation: str,
    expert_size: int,
    keep: bool,
) -> Activations:
    """Gated activations of every row's pool."""
    tiles, neurons = layout.tiles, layout.neurons
    shape = (layout.token_ids.shape[0], neurons.shape[1])
    active = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
    pre_up = torch.empty_like(active) if keep else None
    pre_gate = torch.empty_like(active) if keep and gate is not None else None
    if tiles.count:
        blocks = _blocks(hidden.shape[1], shape[1], hidden.dtype)
        _activations_kernel[(triton.cdiv(shape[1], blocks["BLOCK_P"]), tiles.count)](
            hidden, up if gate is None else gate, up, gates,
            active if pre_gate is None else pre_gate, active if pre_up is None else pre_up, active,
            tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, neurons,
            gates.stride(0), gates.stride(1),
            NEURONS=shape[1], DIM=hidden.shape[1], EXPERT_SIZE=expert_size,
            BLOCK_T=tiles.block, ACTIVATION=ACTIVATION_CODES[activation],
            GATED=gate is not None, KEEP=keep, PRECISION=dot_precision(hidden.dtype),
            num_warps=4, num_stages=3, **blocks,
        )  # fmt: skip
    return Activations(active, pre_gate, pre_up)


@dataclass(frozen=True)
class ActivationGrads:
    """[N, neurons] each."""

    active: Tensor
    grad_gates: Tensor  # per neuron
    grad_gate: Tensor | None  # of the pre-activations
    grad_up: Tensor


def activation_backward(
    grad_output: Tensor,
    down: Tensor,
    gates: Tensor,
    pre_gate: Tensor | None,
    pre_up: Tensor,
    layout: Layout,
    *,
    activation: str,
    expert_size: int,
) -> ActivationGrads:
    """Everything between the output's gradient and the products that end the backward."""
    tiles, neurons = layout.tiles, layout.neurons
    active, grad_up = torch.empty_like(pre_up), torch.empty_like(pre_up)
    grad_gates = torch.empty_like(pre_up, dtype=gates.dtype)
    grad_gate = None if pre_gate is None else torch.empty_like(pre_up)
    if tiles.count:
        dim = grad_output.shape[1]
        blocks = _blocks(dim, pre_up.shape[1], pre_up.dtype)
        _activation_grads_kernel[(triton.cdiv(pre_up.shape[1], blocks["BLOCK_P"]), tiles.count)](
            grad_output, down, gates, pre_up if pre_gate is None else pre_gate, pre_up,
            active, grad_gates, grad_up if grad_gate is None else grad_gate, grad_up,
            tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, neurons,
            gates.stride(0), gates.stride(1),
            NEURONS=pre_up.shape[1], DIM=dim, EXPERT_SIZE=expert_size,
            BLOCK_T=tiles.block, ACTIVATION=ACTIVATION_CODES[activation],
            GATED=pre_gate is not None, PRECISION=dot_precision(pre_up.dtype),
            num_warps=8, num_stages=3, **blocks,
        )  # fmt: skip
    return ActivationGrads(active, grad_gates, grad_gate, grad_up)
