"""Experts over per-token lists (Eq. 1): rows fetched by index, nothing of size T * K * D.

What PEER and exact top-K run on, and every router when there are too few tokens to fill cells.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from airmoe.kernels.backend import operator, own_precision, use_triton
from airmoe.kernels.expert_tables import ExpertTables, activate, backward_follows
from airmoe.kernels.rows import gather_dot, gather_total

SMALL_BATCH = 64  # tokens up to which fetching the chosen beats products over pools


@own_precision
def token_experts(
    hidden: Tensor, tables: ExpertTables, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """Sum over each token's list of its weighted experts: [T, D] in the dtype of `hidden`.

    hidden [T, D] and the tables in one dtype; weights, expert_ids [T, K]. An expert that a token
    lists twice counts twice; weight 0 marks an unused slot, which adds nothing.
    """
    gate, up, down = tables.gate, tables.up, tables.down
    if use_triton(hidden, gate, up, down, weights, expert_ids):
        keep = backward_follows(hidden, gate, up, down, weights)
        form = (tables.activation, tables.size, keep)
        return token_experts_op(hidden, gate, up, down, weights, expert_ids, *form)[0]
    neurons = tables.neurons(expert_ids)  # [T, K * S]
    pre_gate = None if gate is None else gather_dot(hidden, gate, neurons)
    active = activate(tables.activation, gather_dot(hidden, up, neurons), pre_gate)
    weights = weights.to(active.dtype).repeat_interleave(tables.size, dim=-1)
    return gather_total(active * weights, down, neurons)


@operator("airmoe::token_experts")
def token_experts_op(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
    expert_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output [T, D], pre-activations of up and of gate [T, K * S], which are for the backward).

    Without `keep` the latter are empty, as is that of gate where there is none.
    """
    from airmoe.kernels.token_experts_triton import forward_of_few, forward_of_many

    tables = ExpertTables.of(gate, up, down, activation, expert_size).contiguous()
    lists = hidden.contiguous(), tables, weights.contiguous(), expert_ids.contiguous()
    pre = _empty_pre(hidden, gate, expert_ids, expert_size, keep)
    if 0 < hidden.shape[0] <= SMALL_BATCH and expert_ids.shape[1] > 0:
        return forward_of_few(*lists, pre), *pre
    output, pre_up, pre_gate = forward_of_many(*lists)
    return (output, pre_up, pre_gate) if keep else (output, *pre)


@operator("airmoe::token_experts_backward")
def token_experts_backward_op(
    grad_output: Tensor,
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    pre_up: Tensor,
    pre_gate: Tensor,
    activation: str,
    expert_size: int,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of those of (hidden, gate, up, down, weights) that are wanted, in this order."""
    from airmoe.kernels import token_experts_triton

    tables = ExpertTables.of(gate, up, down, activation, expert_size).contiguous()
    lists = hidden.contiguous(), tables, weights.contiguous(), expert_ids.contiguous()
    names = ("hidden", "gate", "up", "down", "weights")
    want = [name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]
    grads = token_experts_triton.backward(
        grad_output.contiguous(), *lists, (pre_up, pre_gate), set(want)
    )
    return [grads[name] for name in want]


def _empty_pre(
    hidden: Tensor, gate: Tensor | None, expert_ids: Tensor, expert_size: int, keep: bool
) -> tuple[Tensor, Tensor]:
    shape = (expert_ids.shape[0], expert_ids.shape[1] * expert_size)
    return (
        hidden.new_empty(shape if keep else 0),
        hidden.new_empty(shape if keep and gate is not None else 0),
    )


@token_experts_op.register_fake
def _(hidden: Tensor, gate: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, expert_ids, _activation, expert_size, keep = rest
    pre = _empty_pre(hidden, gate, expert_ids, expert_size, keep)
    return hidden.new_empty(hidden.shape), *pre


@token_experts_backward_op.register_fake
def _(_grad_output: Tensor, *inputs: Any) -> list[Tensor]:
    chosen = [tensor for tensor, want in zip(inputs[:5], inputs[-1], strict=True) if want]
    return [tensor.new_empty(tensor.shape) for tensor in chosen if tensor is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.activation, ctx.expert_size, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)  # the pre-activations have no gradient: nothing to fill


def _backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad_output is None:
        return (None,) * 9
    wanted = list(ctx.needs_input_grad[:5])
    form = (ctx.activation, ctx.expert_size, wanted)
    grads = iter(token_experts_backward_op(grad_output, *ctx.saved_tensors, *form))
    return (*(next(grads) if want else None for want in wanted), None, None, None, None)


token_experts_op.register_autograd(_backward, setup_context=_save)


@operator("airmoe::compact_gates")
def compact_gates_op(
    gates: Tensor, pools: Tensor, cell_of_row: Tensor, token_ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Cells' gates [T, M] as lists by token [T, count]: expert ids and weights."""
    from airmoe.kernels.token_experts_triton import compact_gates

    return compact_gates(gates, pools, cell_of_row, token_ids, count)


@compact_gates_op.register_fake
def _(
    gates: Tensor, pools: Tensor, cell_of_row: Tensor, token_ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    shape = (gates.shape[0], count)
    return pools.new_empty(shape), gates.new_empty(shape)
