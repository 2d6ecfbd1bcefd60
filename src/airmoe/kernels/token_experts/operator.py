"""`airmoe::token_experts`: the Triton path as an operator that compilers and graphs can take in.

Large batches run the products of `kernels.rows`, one matrix or two at a time, so that little more
than one table competes for the cache. A few tokens (decoding) have kernels of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.operators import operator
from airmoe.kernels.rows.triton import row_dots, row_sums, row_totals, sort_entries
from airmoe.kernels.token_experts import SMALL_BATCH
from airmoe.kernels.token_experts.reference import neuron_rows
from airmoe.kernels.token_experts.small_batch_triton import small_batch
from airmoe.kernels.token_experts.triton import compact_gates, weigh, weigh_grads


@operator("airmoe::token_experts")
def token_experts(
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
    hidden, up, down = hidden.contiguous(), up.contiguous(), down.contiguous()
    gate = None if gate is None else gate.contiguous()
    weights, expert_ids = weights.contiguous(), expert_ids.contiguous()
    nothing = hidden.new_empty(0), hidden.new_empty(0)
    if 0 < hidden.shape[0] <= SMALL_BATCH and expert_ids.shape[1] > 0:
        pre_up, pre_gate = nothing
        if keep:
            pre_up, pre_gate = _empty_pre(hidden, gate, expert_ids, expert_size)
        output = small_batch(
            hidden, gate, up, down, weights, expert_ids, (pre_up, pre_gate),
            activation, expert_size, keep,
        )  # fmt: skip
        return output, pre_up, pre_gate
    neurons = neuron_rows(expert_ids, expert_size)
    tables = [up] if gate is None else [up, gate]
    dots = row_dots(hidden, tables, neurons, hidden.dtype)
    weighted = weigh(dots[0], dots[-1], weights, activation, expert_size)
    output = row_totals([(weighted, down)], neurons, hidden.dtype)
    pre = (dots[0], nothing[1] if gate is None else dots[1]) if keep else nothing
    return output, *pre


@operator("airmoe::token_experts_backward")
def token_experts_backward(
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
    names = ("hidden", "gate", "up", "down", "weights")
    want = {name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted}
    grads: dict[str, Tensor] = {}
    grad_output, hidden, weights = (t.contiguous() for t in (grad_output, hidden, weights))
    neurons = neuron_rows(expert_ids.contiguous(), expert_size)
    activations = (
        pre_up, pre_up if gate is None else pre_gate, weights, activation, expert_size
    )  # fmt: skip
    entries = sort_entries(neurons, up.shape[0]) if want & {"gate", "up", "down"} else None
    if entries is not None and "down" in want:
        factors = [weigh(*activations)]
        (grads["down"],) = row_sums(factors, grad_output, entries, down.dtype)
    if want - {"down"}:
        (grad_weighted,) = row_dots(grad_output, [down.contiguous()], neurons, torch.float32)
        grad_up, grad_gate, grads["weights"] = weigh_grads(grad_weighted, *activations)
        del grad_weighted
        through = {"up": (grad_up, up)} | ({} if gate is None else {"gate": (grad_gate, gate)})
        if "hidden" in want:
            pairs = [(factor, table.contiguous()) for factor, table in through.values()]
            grads["hidden"] = row_totals(pairs, neurons, hidden.dtype)
        tables = [name for name in through if name in want]
        if entries is not None and tables:
            factors = [through[name][0] for name in tables]
            sums = row_sums(factors, hidden, entries, up.dtype)
            grads.update(zip(tables, sums, strict=True))
    return [grads[name] for name in names if name in want]


def _empty_pre(
    hidden: Tensor, gate: Tensor | None, expert_ids: Tensor, expert_size: int
) -> tuple[Tensor, Tensor]:
    shape = (expert_ids.shape[0], expert_ids.shape[1] * expert_size)
    return hidden.new_empty(shape), hidden.new_empty(0 if gate is None else shape)


@token_experts.register_fake
def _(hidden: Tensor, gate: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, expert_ids, _activation, expert_size, keep = rest
    pre = (hidden.new_empty(0), hidden.new_empty(0))
    if keep:
        pre = _empty_pre(hidden, gate, expert_ids, expert_size)
    return hidden.new_empty(hidden.shape), *pre


@token_experts_backward.register_fake
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
    grads = iter(
        token_experts_backward(
            grad_output, *ctx.saved_tensors, ctx.activation, ctx.expert_size, wanted
        )
    )
    return (*(next(grads) if want else None for want in wanted), None, None, None, None)


token_experts.register_autograd(_backward, setup_context=_save)


@operator("airmoe::compact_gates")
def compact_gates_op(
    gates: Tensor, pools: Tensor, cell_of_row: Tensor, token_ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    return compact_gates(gates, pools, cell_of_row, token_ids, count)


@compact_gates_op.register_fake
def _(
    gates: Tensor, pools: Tensor, cell_of_row: Tensor, token_ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    shape = (gates.shape[0], count)
    return pools.new_empty(shape), gates.new_empty(shape)
