"""Experts over cells (Eq. 1): per cell a few dense products, no per-token gather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.cells import Cells, RowAdder, RowReader, nonempty_cells
from airmoe.kernels.expert_tables import Activation, ExpertTables, activate, backward_follows


@own_precision
def cell_experts(
    hidden: Tensor,
    tables: ExpertTables,
    gates: Tensor,
    cells: Cells,
    *,
    counts: Tensor | None = None,
) -> Tensor:
    """Sum over each token's rows of its gated experts: [T, D] in the dtype of `hidden`.

    hidden [T, D], gates [N, M]. Experts with gate 0 add nothing but are computed: the price of
    dense products. With `counts` [G, M], how many rows of a cell have a gate for each of its
    experts, Triton's backward passes over those without.
    """
    gate, up, down = tables.gate, tables.up, tables.down
    keep = backward_follows(hidden, gate, up, down, gates)
    if use_triton(hidden, gate, up, down):
        return _by_triton(hidden, tables.contiguous(), gates, cells, counts, keep)
    form = _Form(tables.activation, tables.size, hidden.dtype, keep)
    return _CellExperts.apply(  # type: ignore[no-any-return]
        hidden, gate, up, down, gates, cells.token_ids, cells.offsets, cells.pools, form
    )


@dataclass(frozen=True)
class _Form:
    """The static part of the call."""

    activation: Activation
    expert_size: int  # neurons per expert
    work: torch.dtype  # dtype of the products
    keep: bool  # whether a backward may follow


class _CellExperts(torch.autograd.Function):
    """output[token] += (act(hidden @ up[pool].T) * gates) @ down[pool], cell by cell.

    The pre-activations [N, neurons] are kept for the backward: on a CPU keeping them is cheaper
    than forming them again. Weight gradients of all cells are summed into one [E, D] buffer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        gate: Tensor | None,
        up: Tensor,
        down: Tensor,
        gates: Tensor,
        token_ids: Tensor,
        offsets: Tensor,
        pools: Tensor,
        form: _Form,
    ) -> Tensor:
        size, work = form.expert_size, form.work
        # A token may have many rows: their sum is kept in float32 whatever the products are in.
        wide = torch.promote_types(work, torch.float32)
        output = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        kept_shape = (token_ids.shape[0] if form.keep else 0, pools.shape[1] * size)
        pre_up = torch.empty(kept_shape, dtype=work, device=hidden.device)
        pre_gate = torch.empty_like(pre_up) if gate is not None else None
        read_up, read_down = (RowReader(table, kept_shape[1], work) for table in (up, down))
        read_gate = None if gate is None else RowReader(gate, kept_shape[1], work)
        for rows, tokens, pool in _cell_parts(token_ids, offsets, pools, size):
            tokens_hidden = hidden.index_select(0, tokens).to(work)
            weights = _per_neuron(gates[rows].to(work), size)  # [rows, neurons]
            # Experts that were not chosen add nothing, even if they overflow: act(0) is 0.
            unused = weights == 0
            part_up = (tokens_hidden @ read_up(pool).T).masked_fill(unused, 0)
            part_gate = None
            if read_gate is not None and pre_gate is not None:
                part_gate = (tokens_hidden @ read_gate(pool).T).masked_fill(unused, 0)
                if form.keep:
                    pre_gate[rows] = part_gate
            if form.keep:
                pre_up[rows] = part_up
            weighted = activate(form.activation, part_up, part_gate) * weights
            output.index_add_(0, tokens, (weighted @ read_down(pool)).to(wide))
        ctx.form = form
        ctx.save_for_backward(
            hidden, gate, up, down, gates, token_ids, offsets, pools, pre_up, pre_gate
        )
        return output.to(work)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, gates, token_ids, offsets, pools, pre_up, pre_gate = (
            ctx.saved_tensors
        )
        form: _Form = ctx.form
        size, work = form.expert_size, form.work
        grad_output = grad_output.to(work)
        wide = torch.promote_types(work, torch.float32)
        grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        grad_gates = torch.empty_like(gates)
        neurons = pools.shape[1] * size
        tables = {"gate": gate, "up": up, "down": down}
        read = {key: RowReader(t, neurons, work) for key, t in tables.items() if t is not None}
        # Frozen weights get no gradient, and no buffer of their size.
        wanted = dict(zip(tables, ctx.needs_input_grad[1:4], strict=True))
        sums = {key: RowAdder(tables[key], neurons, work) for key, want in wanted.items() if want}
        for rows, tokens, pool in _cell_parts(token_ids, offsets, pools, size):
            tokens_hidden = hidden.index_select(0, tokens).to(work)
            tokens_grad = grad_output.index_select(0, tokens)
            weights = _per_neuron(gates[rows].to(work), size)
            grad_weighted = tokens_grad @ read["down"](pool).T  # [rows, neurons]
            grad_weighted = grad_weighted.masked_fill(weights == 0, 0)
            active, grads = _activation_backward(
                form.activation,
                pre_up[rows],
                pre_gate[rows] if pre_gate is not None else None,
                grad_weighted * weights,
            )
            if "down" in sums:
                sums["down"].add(pool, active * weights, tokens_grad)
            grad_gates[rows] = _per_expert(grad_weighted.mul_(active), size).to(gates.dtype)
            for key, grad in grads.items():
                if key in sums:
                    sums[key].add(pool, grad, tokens_hidden)
                grad_hidden.index_add_(0, tokens, (grad @ read[key](pool)).to(wide))
        grad_tables = {key: adder.total.to(tables[key].dtype) for key, adder in sums.items()}
        return (
            grad_hidden.to(hidden.dtype),
            grad_tables.get("gate"),
            grad_tables.get("up"),
            grad_tables.get("down"),
            grad_gates,
            *(None,) * 4,
        )


def _per_neuron(gates: Tensor, size: int) -> Tensor:
    """[rows, experts] -> [rows, experts * size]."""
    return gates if size == 1 else gates.repeat_interleave(size, dim=-1)


def _per_expert(values: Tensor, size: int) -> Tensor:
    """[rows, experts * size] -> [rows, experts], summed over an expert's neurons."""
    return values if size == 1 else values.unflatten(-1, (-1, size)).sum(-1)


def _activation_backward(
    activation: Activation, up: Tensor, gate: Tensor | None, grad: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """(activated values, gradients of the pre-activations by table)."""
    inputs = {"up": up.detach().requires_grad_()}
    if gate is not None:
        inputs["gate"] = gate.detach().requires_grad_()
    with torch.enable_grad():
        active = activate(activation, inputs["up"], inputs.get("gate"))
    grads = torch.autograd.grad(active, tuple(inputs.values()), grad)
    return active.detach(), dict(zip(inputs, grads, strict=True))


def _cell_parts(
    token_ids: Tensor, offsets: Tensor, pools: Tensor, expert_size: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their tokens, the pool's neuron rows) of each non-empty cell."""
    neurons = torch.arange(expert_size, device=pools.device)
    for cell, rows in nonempty_cells(offsets):
        pool = pools[cell]
        if expert_size > 1:
            pool = (pool.unsqueeze(-1) * expert_size + neurons).flatten()
        yield rows, token_ids[rows], pool


def _by_triton(
    hidden: Tensor,
    tables: ExpertTables,
    gates: Tensor,
    cells: Cells,
    counts: Tensor | None,
    keep: bool,
) -> Tensor:
    from airmoe.kernels.cell_experts_triton import cell_experts_op

    reverse_of = tables.up.shape[0] if keep and tables.size == 1 else None
    layout = cells.layout(reverse_of)
    if tables.size > 1:
        layout = replace(layout, pools=tables.neurons(layout.pools))
    return cell_experts_op(
        hidden.contiguous(), tables.gate, tables.up, tables.down, gates, layout.tensors(),
        counts if keep else None, tables.activation, tables.size, keep,
    )[0]  # fmt: skip
