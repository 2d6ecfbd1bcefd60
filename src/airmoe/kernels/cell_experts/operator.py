"""`airmoe::cell_experts`: the Triton path as an operator that compilers and graphs can take in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.cell_experts.triton import Layout, activation_backward, activations
from airmoe.kernels.cells import Cells
from airmoe.kernels.cells.parts_triton import make_parts
from airmoe.kernels.cells.pool_products_triton import pool_products
from airmoe.kernels.cells.reverse import ReverseIndex, make_reverse
from airmoe.kernels.cells.row_products_triton import row_products
from airmoe.kernels.cells.tiles import RowTiles
from airmoe.kernels.cells.used_triton import used_entries
from airmoe.kernels.operators import operator
from airmoe.kernels.token_experts.reference import neuron_rows


@operator("airmoe::cell_experts")
def _forward(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gates: Tensor,
    tile_cells: Tensor,
    tile_first: Tensor,
    tile_rows: Tensor,
    block: int,
    offsets: Tensor,
    token_ids: Tensor,
    neurons: Tensor,
    entries: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    activation: str,
    expert_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Layout(RowTiles(tile_cells, tile_first, tile_rows, block), offsets, token_ids, neurons)
    found = activations(
        hidden, gate, up, gates, layout, activation=activation, expert_size=expert_size, keep=keep
    )
    output = pool_products(
        [(found.active, down)], layout.tiles, offsets, token_ids, neurons, hidden.shape[0]
    )
    return (
        output,
        hidden.new_empty(0) if found.pre_gate is None else found.pre_gate,
        hidden.new_empty(0) if found.pre_up is None else found.pre_up,
    )


@_forward.register_fake
def _(hidden: Tensor, gate: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, token_ids, neurons, _entries, _starts, _counts, _activation, _size, keep = rest
    shape = (token_ids.shape[0], neurons.shape[1])
    return (
        torch.empty_like(hidden),
        hidden.new_empty(shape if keep and gate is not None else 0),
        hidden.new_empty(shape if keep else 0),
    )


@operator("airmoe::cell_experts_backward")
def _backward(
    grad_output: Tensor,
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gates: Tensor,
    pre_gate: Tensor,
    pre_up: Tensor,
    tile_cells: Tensor,
    tile_first: Tensor,
    tile_rows: Tensor,
    block: int,
    offsets: Tensor,
    token_ids: Tensor,
    neurons: Tensor,
    entries: Tensor | None,
    starts: Tensor | None,
    counts: Tensor | None,
    activation: str,
    expert_size: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tiles = RowTiles(tile_cells, tile_first, tile_rows, block)
    layout = Layout(tiles, offsets, token_ids, neurons)
    found = activation_backward(
        grad_output,
        down,
        gates,
        None if gate is None else pre_gate,
        pre_up,
        layout,
        activation=activation,
        expert_size=expert_size,
    )
    want_hidden, want_gate, want_up, want_down, want_gates = wanted
    grad_hidden = hidden.new_empty(0)
    if want_hidden:
        pairs = [(found.grad_up, up)]
        if gate is not None and found.grad_gate is not None:
            pairs.append((found.grad_gate, gate))
        grad_hidden = pool_products(pairs, tiles, offsets, token_ids, neurons, hidden.shape[0])
    if entries is None or starts is None:
        reverse = make_reverse(neurons, up.shape[0])
    else:
        reverse = ReverseIndex(entries, starts)

    parts = make_parts(
        reverse, neurons, token_ids.shape[0], hidden.shape[1] * hidden.element_size()
    )
    if counts is not None:
        reverse = used_entries(reverse, counts)

    def table_grad(x: Tensor | None, values: Tensor, table: Tensor | None, want: bool) -> Tensor:
        if not want or x is None or table is None:
            return hidden.new_empty(0)
        layout = (offsets, token_ids, neurons, reverse, parts)
        return row_products(x, values, table, *layout, counts=counts)

    grad_gates = hidden.new_empty(0)  # not the same as above: outputs must not alias
    if want_gates:
        grad_gates = found.grad_gates
        if expert_size > 1:
            grad_gates = grad_gates.float().unflatten(-1, (-1, expert_size)).sum(-1)
        grad_gates = grad_gates.to(gates.dtype)
    return (
        grad_hidden,
        table_grad(found.grad_gate, hidden, gate, want_gate),
        table_grad(found.grad_up, hidden, up, want_up),
        table_grad(found.active, grad_output, down, want_down),
        grad_gates,
    )


@_backward.register_fake
def _(_grad_output: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    *_, wanted = inputs
    hidden = inputs[0]
    return tuple(
        torch.empty_like(value) if want and value is not None else hidden.new_empty(0)
        for value, want in zip(inputs[:5], wanted, strict=True)
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, gate, up, down, gates, cells, first, rows, block, *rest = inputs
    offsets, token_ids, neurons, entries, starts, counts, activation, expert_size, _keep = rest
    ctx.fixed = (block, activation, expert_size)
    ctx.save_for_backward(
        hidden, gate, up, down, gates, output[1], output[2],
        cells, first, rows, offsets, token_ids, neurons, entries, starts, counts,
    )  # fmt: skip


def _autograd(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *operands, cells, first, rows = ctx.saved_tensors[:10]
    layout = ctx.saved_tensors[10:]
    block, activation, expert_size = ctx.fixed
    wanted = list(ctx.needs_input_grad[:5])
    wanted[1] = wanted[1] and operands[1] is not None
    grads = torch.ops.airmoe.cell_experts_backward(
        grad_output.to(operands[0].dtype).contiguous(), *operands, cells, first, rows, block,
        *layout, activation, expert_size, wanted,
    )  # fmt: skip
    return *(g if want else None for g, want in zip(grads, wanted, strict=True)), *(None,) * 13


_forward.register_autograd(_autograd, setup_context=_setup)


def run(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gates: Tensor,
    cells: Cells,
    *,
    activation: str,
    expert_size: int,
    keep: bool,
    counts: Tensor | None,
) -> Tensor:
    """`cell_experts` on Triton: [T, D]."""
    tiles, neurons = cells.row_tiles(), cells.pools
    reverse = None
    if expert_size > 1:
        neurons = neuron_rows(neurons, expert_size)
    elif keep:
        reverse = cells.reverse_index(up.shape[0])
    entries, starts = (None, None) if reverse is None else (reverse.entries, reverse.starts)
    gate = None if gate is None else gate.contiguous()
    return torch.ops.airmoe.cell_experts(
        hidden.contiguous(), gate, up.contiguous(), down.contiguous(), gates,
        tiles.cells, tiles.first_rows, tiles.rows, tiles.block, cells.offsets, cells.token_ids,
        neurons, entries, starts, counts if keep else None, activation, expert_size, keep,
    )[0]  # fmt: skip
