"""Experts of many cells at once: what reference.py does, in batched products.

Pre-activations are not kept: the backward has gathered all it needs to form them again, which on a
GPU is cheaper than to write, hold and read [N, neurons]. Sums into experts that several cells
share are in no fixed order on a GPU, unless `torch.use_deterministic_algorithms` asks for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.cell_experts.activations import activate
from airmoe.kernels.cell_experts.reference import (
    Form,
    _activation_backward,
    _per_expert,
    _per_neuron,
)
from airmoe.kernels.cells.groups import (
    add_rows,
    gather,
    make_groups,
    put_rows,
    with_zero_row,
    without_last_row,
)
from airmoe.kernels.precision import own_precision


class CellExperts(torch.autograd.Function):
    """output[token] += (act(hidden @ up[pool].T) * gates) @ down[pool], group by group."""

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
        form: Form,
    ) -> Tensor:
        size, work = form.expert_size, form.work
        (num_tokens, dim), num_neurons = hidden.shape, pools.shape[1] * size
        groups = make_groups(
            token_ids,
            offsets,
            num_tokens,
            table_bytes=num_neurons * dim * work.itemsize,
            row_bytes=max(num_neurons, dim) * work.itemsize,
        )
        padded_hidden, padded_gates = (with_zero_row(t, work) for t in (hidden, gates))
        # A token may have many rows: their sum is kept in float32 whatever the products are in.
        wide = torch.promote_types(work, torch.float32)
        output = torch.zeros_like(padded_hidden, dtype=wide)
        for group in groups:
            neurons = _neurons(pools, group.cells, size)
            tokens_hidden = gather(padded_hidden, group.tokens, work)  # [cells, length, D]
            pre_up, pre_gate = (
                None if table is None else torch.bmm(tokens_hidden, gather(table, neurons, work).mT)
                for table in (up, gate)
            )  # [cells, length, neurons]
            assert pre_up is not None
            weighted = activate(form.activation, pre_up, pre_gate)
            weighted *= _per_neuron(gather(padded_gates, group.rows, work), size)
            add_rows(output, group.tokens, torch.bmm(weighted, gather(down, neurons, work)))
        ctx.form, ctx.groups = form, groups
        ctx.save_for_backward(hidden, gate, up, down, gates, pools)
        return without_last_row(output).to(work)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, gates, pools = ctx.saved_tensors
        form: Form = ctx.form
        size, work = form.expert_size, form.work
        padded_hidden, padded_grad, padded_gates = (
            with_zero_row(t, work) for t in (hidden, grad_output, gates)
        )
        wide = torch.promote_types(work, torch.float32)
        grad_hidden = torch.zeros_like(padded_hidden, dtype=wide)
        grad_gates = torch.empty_like(padded_gates, dtype=gates.dtype)
        tables = {"gate": gate, "up": up, "down": down}
        # Frozen weights get no gradient, and no buffer of their size.
        wanted = dict(zip(tables, ctx.needs_input_grad[1:4], strict=True))
        sums = {key: _zeros_for(tables[key]) for key, want in wanted.items() if want}
        for group in ctx.groups:
            neurons = _neurons(pools, group.cells, size)
            tokens_hidden = gather(padded_hidden, group.tokens, work)  # [cells, length, D]
            tokens_grad = gather(padded_grad, group.tokens, work)
            weights = _per_neuron(gather(padded_gates, group.rows, work), size)
            grad_weighted = torch.bmm(tokens_grad, gather(down, neurons, work).mT)
            read = {
                key: gather(table, neurons, work)
                for key, table in (("up", up), ("gate", gate))
                if table is not None
            }
            before = {key: torch.bmm(tokens_hidden, rows.mT) for key, rows in read.items()}
            active, grads = _activation_backward(
                form.activation, before["up"], before.get("gate"), grad_weighted * weights
            )
            put_rows(grad_gates, group.rows, _per_expert(grad_weighted.mul_(active), size))
            if "down" in sums:
                weighted = active.mul_(weights)
                add_rows(sums["down"], neurons, torch.bmm(weighted.mT, tokens_grad))
            for key, grad in grads.items():
                if key in sums:
                    add_rows(sums[key], neurons, torch.bmm(grad.mT, tokens_hidden))
                add_rows(grad_hidden, group.tokens, torch.bmm(grad, read[key]))
        grad_tables = {key: total.to(tables[key].dtype) for key, total in sums.items()}
        return (
            grad_hidden[:-1].to(hidden.dtype),
            grad_tables.get("gate"),
            grad_tables.get("up"),
            grad_tables.get("down"),
            grad_gates[:-1],
            *(None,) * 4,
        )


def _neurons(pools: Tensor, cells: Tensor, size: int) -> Tensor:
    """The neuron rows of each cell's pool: [cells, M * size]."""
    pool = pools.index_select(0, cells)
    if size == 1:
        return pool
    return (pool.unsqueeze(-1) * size + torch.arange(size, device=pool.device)).flatten(1)


def _zeros_for(table: Tensor) -> Tensor:
    """Where the gradient of a table is summed: in float32 or wider, whatever the table is."""
    return torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
