"""Logits of the experts that tokens have chosen, differentiable, with no [T, K, D] tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.backend import operator, own_precision, use_triton
from airmoe.kernels.norms import inverse_norms_op, unit_rows
from airmoe.kernels.rows import gather_dot


@own_precision
def chosen_logits(hidden: Tensor, experts: Tensor, ids: Tensor, *, normalize: bool) -> Tensor:
    """<h_t, w_id>, with `normalize` divided by |w_id|: [T, K], float32 or wider.

    hidden [T, D], experts [E, D], ids [T, K]. A zero row gives 0. The gradient goes through the
    norm; gradients are in the dtype of their operand. Operands may differ in dtype.
    """
    if use_triton(hidden, experts, ids):
        return chosen_logits_op(hidden, experts, ids, normalize)
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    rows = unit_rows(experts) if normalize else experts
    return gather_dot(hidden.to(work), rows.to(work), ids)


@operator("airmoe::chosen_logits")
def chosen_logits_op(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """[T, K] float32; norms are taken where the rows are fetched."""
    from airmoe.kernels.rows_triton import row_dots

    hidden, experts, ids = hidden.contiguous(), experts.contiguous(), ids.contiguous()
    return row_dots(hidden, [experts], ids, torch.float32, normalize=normalize)[0]


@operator("airmoe::chosen_logits_backward")
def chosen_logits_backward_op(
    grads: Tensor,
    hidden: Tensor,
    experts: Tensor,
    ids: Tensor,
    normalize: bool,
    want_hidden: bool,
    want_experts: bool,
) -> list[Tensor]:
    """Gradients of those of (hidden, experts) that are wanted, in this order."""
    from airmoe.kernels.rows_triton import row_totals, scale_by_rows, sort_entries, table_grads

    found: list[Tensor] = []
    hidden, experts, ids = hidden.contiguous(), experts.contiguous(), ids.contiguous()
    grads = grads.float().contiguous()
    if want_hidden:
        factors = scale_by_rows(grads, ids, inverse_norms_op(experts)) if normalize else grads
        found.append(row_totals([(factors, experts)], ids, hidden.dtype))
    if want_experts:
        entries = sort_entries(ids, experts.shape[0])
        found.append(table_grads(grads, hidden, experts, entries, project=normalize))
    return found


@chosen_logits_op.register_fake
def _(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    return hidden.new_empty(ids.shape, dtype=torch.float32)


@chosen_logits_backward_op.register_fake
def _(_grads: Tensor, *inputs: Any) -> list[Tensor]:
    wanted = zip(inputs[:2], inputs[-2:], strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, want in wanted if want]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    *tensors, ctx.normalize = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:2]
    found = iter(chosen_logits_backward_op(grads, *ctx.saved_tensors, ctx.normalize, *wanted))
    return (*(next(found) if want else None for want in wanted), None, None)


chosen_logits_op.register_autograd(_backward, setup_context=_save)
