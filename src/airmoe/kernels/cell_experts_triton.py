"""Experts of a cell as grouped products over its pool, rows of the tables fetched by index.

Forward: pre-activations and activation in one kernel, the down product in another (the [N, neurons]
activations between them are the only large buffer; a fused form would not fit wide models).
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.activations_triton import ACTIVATION_CODES, activate, activation_grads
from airmoe.kernels.backend import operator
from airmoe.kernels.device_triton import dot_precision
from airmoe.kernels.expert_tables import ExpertTables
from airmoe.kernels.layout import CellLayout
from airmoe.kernels.layout_triton import used_entries
from airmoe.kernels.pool_products_triton import pool_products
from airmoe.kernels.row_products_triton import make_parts, row_products


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
class PreActivations:
    """[N, neurons] each, None where they are not kept for a backward."""

    gate: Tensor | None
    up: Tensor | None


def activations(
    hidden: Tensor, tables: ExpertTables, gates: Tensor, layout: CellLayout, *, keep: bool
) -> tuple[Tensor, PreActivations]:
    """Gated activations [N, neurons] of every row's pool; the layout's pools are neurons."""
    tiles, gate, up = layout.tiles, tables.gate, tables.up
    shape = (layout.num_rows, layout.pool)
    active = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
    pre_up = torch.empty_like(active) if keep else None
    pre_gate = torch.empty_like(active) if keep and gate is not None else None
    if tiles.count:
        blocks = _blocks(hidden.shape[1], shape[1], hidden.dtype)
        _activations_kernel[(triton.cdiv(shape[1], blocks["BLOCK_P"]), tiles.count)](
            hidden, up if gate is None else gate, up, gates,
            active if pre_gate is None else pre_gate, active if pre_up is None else pre_up, active,
            tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, layout.pools,
            gates.stride(0), gates.stride(1),
            NEURONS=shape[1], DIM=hidden.shape[1], EXPERT_SIZE=tables.size,
            BLOCK_T=tiles.block, ACTIVATION=ACTIVATION_CODES[tables.activation],
            GATED=gate is not None, KEEP=keep, PRECISION=dot_precision(hidden.dtype),
            num_warps=4, num_stages=3, **blocks,
        )  # fmt: skip
    return active, PreActivations(pre_gate, pre_up)


def forward(
    hidden: Tensor, tables: ExpertTables, gates: Tensor, layout: CellLayout, *, keep: bool
) -> tuple[Tensor, PreActivations]:
    """Output [T, D], and the pre-activations with `keep`."""
    active, pre = activations(hidden, tables, gates, layout, keep=keep)
    return pool_products([(active, tables.down)], layout, hidden.shape[0]), pre


@dataclass(frozen=True)
class ActivationGrads:
    """[N, neurons] each."""

    active: Tensor
    grad_gates: Tensor  # per neuron
    grad_gate: Tensor | None  # of the pre-activations
    grad_up: Tensor


def activation_backward(
    grad_output: Tensor,
    tables: ExpertTables,
    gates: Tensor,
    pre: PreActivations,
    layout: CellLayout,
) -> ActivationGrads:
    """Everything between the output's gradient and the products that end the backward."""
    tiles, pre_gate, pre_up = layout.tiles, pre.gate, pre.up
    assert pre_up is not None, "kept by the forward"
    active, grad_up = torch.empty_like(pre_up), torch.empty_like(pre_up)
    grad_gates = torch.empty_like(pre_up, dtype=gates.dtype)
    grad_gate = None if pre_gate is None else torch.empty_like(pre_up)
    if tiles.count:
        dim = grad_output.shape[1]
        blocks = _blocks(dim, pre_up.shape[1], pre_up.dtype)
        _activation_grads_kernel[(triton.cdiv(pre_up.shape[1], blocks["BLOCK_P"]), tiles.count)](
            grad_output, tables.down, gates, pre_up if pre_gate is None else pre_gate, pre_up,
            active, grad_gates, grad_up if grad_gate is None else grad_gate, grad_up,
            tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, layout.pools,
            gates.stride(0), gates.stride(1),
            NEURONS=pre_up.shape[1], DIM=dim, EXPERT_SIZE=tables.size,
            BLOCK_T=tiles.block, ACTIVATION=ACTIVATION_CODES[tables.activation],
            GATED=pre_gate is not None, PRECISION=dot_precision(pre_up.dtype),
            num_warps=8, num_stages=3, **blocks,
        )  # fmt: skip
    return ActivationGrads(active, grad_gates, grad_gate, grad_up)


def backward(
    grad_output: Tensor,
    hidden: Tensor,
    tables: ExpertTables,
    gates: Tensor,
    pre: PreActivations,
    layout: CellLayout,
    counts: Tensor | None,
    want: set[str],
) -> dict[str, Tensor]:
    """Gradients of those of hidden, gate, up, down and gates that are wanted."""
    found = activation_backward(grad_output, tables, gates, pre, layout)
    grads: dict[str, Tensor] = {}
    through = {"up": (found.grad_up, tables.up)}
    if tables.gate is not None and found.grad_gate is not None:
        through["gate"] = (found.grad_gate, tables.gate)
    if "hidden" in want:
        grads["hidden"] = pool_products(list(through.values()), layout, hidden.shape[0])
    reverse = layout.reverse_index(tables.up.shape[0])
    parts = make_parts(layout, reverse, hidden.shape[1] * hidden.element_size())
    if counts is not None:
        reverse = used_entries(reverse, counts)
    products = {name: (grad, hidden, table) for name, (grad, table) in through.items()}
    products["down"] = (found.active, grad_output, tables.down)
    for name, (x, values, table) in products.items():
        if name in want:
            grads[name] = row_products(x, values, table, layout, reverse, parts, counts=counts)
    if "gates" in want:
        grad_gates = found.grad_gates
        if tables.size > 1:
            grad_gates = grad_gates.float().unflatten(-1, (-1, tables.size)).sum(-1)
        grads["gates"] = grad_gates.to(gates.dtype)
    return grads


@operator("airmoe::cell_experts")
def cell_experts_op(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gates: Tensor,
    layout: list[Tensor],
    counts: Tensor | None,
    activation: str,
    expert_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output [T, D], pre-activations of gate and up [N, neurons], empty where not kept)."""
    tables = ExpertTables.of(gate, up, down, activation, expert_size)
    output, pre = forward(hidden, tables, gates, CellLayout.of(layout), keep=keep)
    return (
        output,
        hidden.new_empty(0) if pre.gate is None else pre.gate,
        hidden.new_empty(0) if pre.up is None else pre.up,
    )


@operator("airmoe::cell_experts_backward")
def cell_experts_backward_op(
    grad_output: Tensor,
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gates: Tensor,
    pre_gate: Tensor,
    pre_up: Tensor,
    layout: list[Tensor],
    counts: Tensor | None,
    activation: str,
    expert_size: int,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of those of (hidden, gate, up, down, gates) that are wanted, in this order."""
    tables = ExpertTables.of(gate, up, down, activation, expert_size)
    pre = PreActivations(None if gate is None else pre_gate, pre_up)
    names = ("hidden", "gate", "up", "down", "gates")
    want = [name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]
    grads = backward(
        grad_output, hidden, tables, gates, pre, CellLayout.of(layout), counts, set(want)
    )
    return [grads[name] for name in want]


@cell_experts_op.register_fake
def _(hidden: Tensor, gate: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    layout, keep = CellLayout.of(rest[3]), rest[-1]
    shape = (layout.num_rows, layout.pool)
    return (
        torch.empty_like(hidden),
        hidden.new_empty(shape if keep and gate is not None else 0),
        hidden.new_empty(shape if keep else 0),
    )


@cell_experts_backward_op.register_fake
def _(_grad_output: Tensor, *inputs: Any) -> list[Tensor]:
    chosen = [tensor for tensor, want in zip(inputs[:5], inputs[-1], strict=True) if want]
    return [torch.empty_like(tensor) for tensor in chosen if tensor is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, layout, counts, ctx.activation, ctx.expert_size, _keep = inputs
    ctx.save_for_backward(*operands, *output[1:], counts, *layout)


def _autograd(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Any, ...]:
    *operands, counts = ctx.saved_tensors[:8]
    layout = list(ctx.saved_tensors[8:])
    wanted = list(ctx.needs_input_grad[:5])
    wanted[1] = wanted[1] and operands[1] is not None
    grad_output = grad_output.to(operands[0].dtype).contiguous()
    form = (counts, ctx.activation, ctx.expert_size, wanted)
    grads = iter(cell_experts_backward_op(grad_output, *operands, layout, *form))
    found = (next(grads) if want else None for want in wanted)
    return *found, [None] * len(layout), None, None, None, None


cell_experts_op.register_autograd(_autograd, setup_context=_setup)
