"""`airmoe::chosen_logits`: the Triton path as an operator that compilers and graphs can take in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.chosen_logits.triton import list_logits, scaled_grads, table_grads
from airmoe.kernels.inverse_norms.triton import inverse_norms_op
from airmoe.kernels.operators import operator
from airmoe.kernels.rows.triton import row_totals, sort_entries


@operator("airmoe::chosen_logits")
def chosen_logits(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """`reference.chosen_logits`: [T, K] float32."""
    return list_logits(hidden.contiguous(), experts.contiguous(), ids.contiguous(), normalize)


@operator("airmoe::chosen_logits_backward")
def chosen_logits_backward(
    grads: Tensor,
    hidden: Tensor,
    experts: Tensor,
    ids: Tensor,
    normalize: bool,
    want_hidden: bool,
    want_experts: bool,
) -> list[Tensor]:
    """Gradients of those of (hidden, experts) that are wanted, in this order."""
    found: list[Tensor] = []
    hidden, experts, ids = hidden.contiguous(), experts.contiguous(), ids.contiguous()
    grads = grads.float().contiguous()
    if want_hidden:
        factors = scaled_grads(grads, ids, inverse_norms_op(experts)) if normalize else grads
        found.append(row_totals([(factors, experts)], ids, hidden.dtype))
    if want_experts:
        entries = sort_entries(ids, experts.shape[0])
        found.append(table_grads(grads, hidden, experts, entries, normalize))
    return found


@chosen_logits.register_fake
def _(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    return hidden.new_empty(ids.shape, dtype=torch.float32)


@chosen_logits_backward.register_fake
def _(_grads: Tensor, *inputs: Any) -> list[Tensor]:
    wanted = zip(inputs[:2], inputs[-2:], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, want in wanted if want]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.normalize = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:2]
    found = iter(chosen_logits_backward(grads, *ctx.saved_tensors, ctx.normalize, *wanted))
    return (*(next(found) if want else None for want in wanted), None, None)


chosen_logits.register_autograd(_backward, setup_context=_save)
