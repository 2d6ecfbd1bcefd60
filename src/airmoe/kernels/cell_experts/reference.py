"""Experts of a cell as dense products over its pool, masked by the gates.

The pre-activations [N, neurons] are kept for the backward: on a CPU keeping them is cheaper than
forming them again. Weight gradients of all cells are summed into one [E, D] buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.cell_experts.activations import Activation, activate
from airmoe.kernels.cells.reference import nonempty_cells


@dataclass(frozen=True)
class Form:
    """The static part of the call."""

    activation: Activation
    expert_size: int  # neurons per expert
    work: torch.dtype  # dtype of the products
    keep: bool  # whether a backward may follow


def cell_parts(
    token_ids: Tensor, offsets: Tensor, pools: Tensor, expert_size: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their tokens, the pool's neuron rows) of each non-empty cell."""
    neurons = torch.arange(expert_size, device=pools.device)
    for cell, rows in nonempty_cells(offsets):
        pool = pools[cell]
        if expert_size > 1:
            pool = (pool.unsqueeze(-1) * expert_size + neurons).flatten()
        yield rows, token_ids[rows], pool


class CellExperts(torch.autograd.Function):
    """output[token] += (act(hidden @ up[pool].T) * gates) @ down[pool], cell by cell."""

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
        output = torch.zeros(hidden.shape, dtype=work, device=hidden.device)
        kept_shape = (token_ids.shape[0] if form.keep else 0, pools.shape[1] * size)
        pre_up = torch.empty(kept_shape, dtype=work, device=hidden.device)
        pre_gate = torch.empty_like(pre_up) if gate is not None else None
        for rows, tokens, pool in cell_parts(token_ids, offsets, pools, size):
            tokens_hidden = hidden.index_select(0, tokens).to(work)
            part_up = tokens_hidden @ up.index_select(0, pool).to(work).T  # [rows, neurons]
            part_gate = None
            if gate is not None and pre_gate is not None:
                part_gate = tokens_hidden @ gate.index_select(0, pool).to(work).T
                if form.keep:
                    pre_gate[rows] = part_gate
            if form.keep:
                pre_up[rows] = part_up
            weighted = activate(form.activation, part_up, part_gate)
            weighted = weighted * _per_neuron(gates[rows].to(work), size)
            output.index_add_(0, tokens, weighted @ down.index_select(0, pool).to(work))
        ctx.form = form
        ctx.save_for_backward(
            hidden, gate, up, down, gates, token_ids, offsets, pools, pre_up, pre_gate
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, gates, token_ids, offsets, pools, pre_up, pre_gate = (
            ctx.saved_tensors
        )
        form: Form = ctx.form
        size, work = form.expert_size, form.work
        grad_output = grad_output.to(work)
        grad_hidden = torch.zeros(hidden.shape, dtype=work, device=hidden.device)
        grad_gates = torch.empty_like(gates)
        grad_up, grad_down = torch.zeros_like(up), torch.zeros_like(down)
        grad_gate = torch.zeros_like(gate) if gate is not None else None
        for rows, tokens, pool in cell_parts(token_ids, offsets, pools, size):
            tokens_hidden = hidden.index_select(0, tokens).to(work)
            tokens_grad = grad_output.index_select(0, tokens)
            weights = _per_neuron(gates[rows].to(work), size)
            part_gate = pre_gate[rows] if pre_gate is not None else None
            grad_weighted = tokens_grad @ down.index_select(0, pool).to(work).T
            active, d_up, d_gate = _activation_backward(
                form.activation, pre_up[rows], part_gate, grad_weighted * weights
            )
            grad_down.index_add_(0, pool, ((active * weights).T @ tokens_grad).to(down.dtype))
            grad_gates[rows] = _per_expert(grad_weighted.mul_(active), size).to(gates.dtype)
            grad_up.index_add_(0, pool, (d_up.T @ tokens_hidden).to(up.dtype))
            tokens_grad = d_up @ up.index_select(0, pool).to(work)
            if gate is not None and grad_gate is not None:
                grad_gate.index_add_(0, pool, (d_gate.T @ tokens_hidden).to(gate.dtype))
                tokens_grad += d_gate @ gate.index_select(0, pool).to(work)
            grad_hidden.index_add_(0, tokens, tokens_grad)
        return (
            grad_hidden.to(hidden.dtype),
            grad_gate,
            grad_up,
            grad_down,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(activated values, gradient of up, gradient of gate); the last is unused without a gate."""
    up = up.detach().requires_grad_()
    gate = gate.detach().requires_grad_() if gate is not None else None
    inputs = (up,) if gate is None else (up, gate)
    with torch.enable_grad():
        active = activate(activation, up, gate)
    grads = torch.autograd.grad(active, inputs, grad)
    return active.detach(), grads[0], grads[-1]
