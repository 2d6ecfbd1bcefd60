"""Experts of a cell as grouped products over its pool, rows of the tables fetched by index.

Forward: pre-activations and activation in one kernel, the down product in another (the [N, neurons]
activations between them are the only large buffer; a fused form would not fit wide models).
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_products_triton import pool_products, table_gradients
from airmoe.kernels.cell_scores_triton import products_tile
from airmoe.kernels.cells import CellLayout
from airmoe.kernels.device_triton import (
    ACTIVATION_CODES,
    activate,
    activation_grads,
    block_size,
    dot_precision,
    load_rows,
    operands_of_tile,
    store_rows,
)
from airmoe.kernels.token_experts import ExpertTables, empty_pre


@triton.jit
def _gates_tile(
    gates, gates_row, gates_column, rows, row_mask, places, place_mask, EXPERT_SIZE: tl.constexpr
):
    """Gates of some rows, for each neuron that of its expert."""
    return tl.load(
        gates
        + rows.to(tl.int64)[:, None] * gates_row
        + (places // EXPERT_SIZE)[None, :] * gates_column,
        mask=row_mask[:, None] & place_mask[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _activations_kernel(
    hidden, gate_table, up_table, gates, pre_gate, pre_up, active,
    tile_cells, tile_first, offsets, token_ids, neurons, gates_row, gates_column,
    NEURONS: tl.constexpr, DIM: tl.constexpr, EXPERT_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        rows, row_mask, tokens, places, place_mask, ids = operands_of_tile(
            tile_first, offsets, token_ids, neurons, tile, cell, NEURONS, BLOCK_T, BLOCK_P
        )
        up = tl.zeros((BLOCK_P, BLOCK_T), tl.float32)
        gate = up
        for start in range(0, DIM, BLOCK_D):
            columns = start + tl.arange(0, BLOCK_D)
            states = load_rows(hidden, tokens, row_mask, columns, DIM)
            up_rows = load_rows(up_table, ids, place_mask, columns, DIM)
            up = tl.dot(up_rows, tl.trans(states), up, input_precision=PRECISION)
            if gate_table is not None:
                gate_rows = load_rows(gate_table, ids, place_mask, columns, DIM)
                gate = tl.dot(gate_rows, tl.trans(states), gate, input_precision=PRECISION)
        up = tl.trans(up)
        gate = tl.trans(gate)
        weight = _gates_tile(
            gates, gates_row, gates_column, rows, row_mask, places, place_mask, EXPERT_SIZE
        )
        # Experts that were not chosen add nothing, even if they overflow: act(0) is 0.
        up = tl.where(weight == 0.0, 0.0, up)
        gate = tl.where(weight == 0.0, 0.0, gate)
        if pre_up is not None:
            store_rows(pre_up, rows, row_mask, places, up, NEURONS)
            if gate_table is not None:
                store_rows(pre_gate, rows, row_mask, places, gate, NEURONS)
        exact: tl.constexpr = active.dtype.element_ty == tl.float32
        value = activate(up, gate, ACTIVATION, exact) * weight
        store_rows(active, rows, row_mask, places, value, NEURONS)


@triton.jit
def _activation_grads_kernel(
    grad_output, down_table, gates, pre_gate, pre_up,
    active, grad_gates, grad_gate, grad_up,
    tile_cells, tile_first, offsets, token_ids, neurons, gates_row, gates_column,
    NEURONS: tl.constexpr, DIM: tl.constexpr, EXPERT_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        rows, row_mask, tokens, places, place_mask, ids = operands_of_tile(
            tile_first, offsets, token_ids, neurons, tile, cell, NEURONS, BLOCK_T, BLOCK_P
        )
        grad = products_tile(
            down_table, grad_output, ids, place_mask, tokens, row_mask,
            DIM, BLOCK_T, BLOCK_P, BLOCK_D, PRECISION,
        )  # fmt: skip
        grad = tl.trans(grad)
        weight = _gates_tile(
            gates, gates_row, gates_column, rows, row_mask, places, place_mask, EXPERT_SIZE
        )
        grad = tl.where(weight == 0.0, 0.0, grad)  # `up` and `gate` are 0 there already
        up = load_rows(pre_up, rows, row_mask, places, NEURONS).to(tl.float32)
        gate = up
        if pre_gate is not None:
            gate = load_rows(pre_gate, rows, row_mask, places, NEURONS).to(tl.float32)
        exact: tl.constexpr = active.dtype.element_ty == tl.float32
        value, value_up, value_gate = activation_grads(up, gate, grad * weight, ACTIVATION, exact)
        store_rows(active, rows, row_mask, places, value * weight, NEURONS)
        store_rows(grad_gates, rows, row_mask, places, value * grad, NEURONS)
        store_rows(grad_up, rows, row_mask, places, value_up, NEURONS)
        if grad_gate is not None:
            store_rows(grad_gate, rows, row_mask, places, value_gate, NEURONS)


def _form(
    dim: int, tables: ExpertTables, gates: Tensor, layout: CellLayout
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Of both kernels: the grid, and what of the layout and of the experts they take."""
    tiles, neurons, dtype = layout.tiles, layout.pool_width, tables.up.dtype
    block_p = block_size(neurons, 64)
    most = 32 if dtype == torch.float32 else 64
    cells = (tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, layout.pools)
    sizes = {
        "NEURONS": neurons, "DIM": dim, "EXPERT_SIZE": tables.size,
        "ACTIVATION": ACTIVATION_CODES[tables.activation],
        "PRECISION": dot_precision(dtype), "BLOCK_T": tiles.block, "BLOCK_P": block_p,
        "BLOCK_D": block_size(dim, most), "num_stages": 3,
    }  # fmt: skip
    grid = (triton.cdiv(neurons, block_p), tiles.count)
    return grid, (*cells, gates.stride(0), gates.stride(1)), sizes


def cell_experts(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gates: Tensor,
    layout: list[Tensor],
    _counts: Tensor | None,
    activation: str,
    expert_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, D], and the pre-activations of up and gate [N, neurons], empty where not kept."""
    tables = ExpertTables(gate, up, down, activation, expert_size)
    cells = CellLayout.of(layout)
    active = hidden.new_empty(cells.num_rows, cells.pool_width)  # gated activations
    pre_up, pre_gate = empty_pre(hidden, gate, active.shape, keep)
    grid, operands, sizes = _form(hidden.shape[1], tables, gates, cells)
    _activations_kernel[grid](
        hidden, gate, up, gates, pre_gate if keep else None, pre_up if keep else None, active,
        *operands, num_warps=4, **sizes,
    )  # fmt: skip
    return pool_products([(active, down)], cells, hidden.shape[0]), pre_up, pre_gate


def cell_experts_backward(call: Any, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of the wanted of hidden, gate, up, down and gates."""
    tables = ExpertTables(call.gate, call.up, call.down, call.activation, call.expert_size)
    layout, hidden, pre_up = CellLayout.of(call.layout), call.hidden, call.pre_up
    active, grad_up = torch.empty_like(pre_up), torch.empty_like(pre_up)
    grad_gates = torch.empty_like(pre_up, dtype=call.gates.dtype)  # per neuron
    pre_gate = None if tables.gate is None else call.pre_gate
    grad_gate = None if tables.gate is None else torch.empty_like(pre_up)
    grid, operands, sizes = _form(hidden.shape[1], tables, call.gates, layout)
    _activation_grads_kernel[grid](
        call.grad_output, tables.down, call.gates, pre_gate, pre_up,
        active, grad_gates, grad_gate, grad_up,
        *operands, num_warps=8, **sizes,
    )  # fmt: skip
    products = {"up": (grad_up, hidden, tables.up)}
    if tables.gate is not None and grad_gate is not None:
        products["gate"] = (grad_gate, hidden, tables.gate)
    grads: dict[str, Tensor] = {}
    if "hidden" in wanted:
        pairs = [(grad, table) for grad, _, table in products.values()]
        grads["hidden"] = pool_products(pairs, layout, hidden.shape[0])
    products["down"] = (active, call.grad_output, tables.down)
    products = {name: product for name, product in products.items() if name in wanted}
    grads |= table_gradients(products, layout, counts=call.counts)
    if "gates" in wanted:
        if tables.size > 1:
            grad_gates = grad_gates.float().unflatten(-1, (-1, tables.size)).sum(-1)
        grads["gates"] = grad_gates.to(call.gates.dtype)
    return grads
