"""Logits of chosen experts on a GPU: the kernels of `rows_triton` as one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.backend import operator
from airmoe.kernels.norms_triton import inverse_norms_op
from airmoe.kernels.rows_triton import (
    row_dots,
    row_totals,
    scale_by_rows,
    sort_entries,
    table_grads,
)


@operator("airmoe::chosen_logits")
def chosen_logits_op(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """[T, K] float32; norms are taken where the rows are fetched."""
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
