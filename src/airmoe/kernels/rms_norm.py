"""Llama's RMS norm of a residual stream, together with the addition before it.

A residual stream goes on beside its norm, so its gradient has two parts. Both are read in the one
pass over the rows that computes the gradients of the stream and of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.backend import operator, use_triton

ROWS_PER_SUM = 16  # whose shares of the weight's gradient one program adds up


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """(hidden + delta, its norm times the weight), both [.., D]; the norm in `dtype` if given.

    Without a `delta` the first is `hidden` itself. As in Llama the norm is rounded to the dtype of
    the stream before it is multiplied by the weight [D].
    """
    if use_triton(hidden, delta, weight):
        wide = hidden.dtype if delta is None else torch.promote_types(hidden.dtype, delta.dtype)
        dtype = dtype or torch.promote_types(wide, weight.dtype)
        return _AddRmsNorm.apply(hidden, delta, weight, eps, dtype)  # type: ignore[no-any-return]
    hidden = hidden if delta is None else hidden + delta
    exact = hidden.to(torch.float32)
    unit = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * unit.to(hidden.dtype)
    return hidden, normed if dtype is None else normed.to(dtype)


class _AddRmsNorm(torch.autograd.Function):
    """A function around two operators, because an operator must not return what it was given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        summed, normed, scales = add_rms_norm_op(hidden, delta, weight, eps, dtype)
        if delta is None:
            summed = hidden
        ctx.save_for_backward(summed, scales, weight)
        ctx.delta_dtype = None if delta is None else delta.dtype
        ctx.set_materialize_grads(False)
        return summed, normed

    @staticmethod
    def backward(
        ctx: Any, grad_summed: Tensor | None, grad_normed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_normed is None:  # the norm was not used
            return grad_summed, grad_summed if ctx.delta_dtype else None, None, None, None
        summed, scales, weight = ctx.saved_tensors
        grad_hidden, grad_delta, sums = _add_rms_norm_backward_op(
            grad_normed, grad_summed, summed, scales, weight, ctx.delta_dtype
        )
        if ctx.delta_dtype is None:
            grad_delta = None
        elif ctx.delta_dtype == grad_hidden.dtype:
            grad_delta = grad_hidden
        return grad_hidden, grad_delta, sums.sum(0).to(weight.dtype), None, None


def empty_sum_and_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    summed = hidden.new_empty(0)
    if delta is not None:
        wide = torch.promote_types(hidden.dtype, delta.dtype)
        summed = hidden.new_empty(hidden.shape, dtype=wide)
    scales = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
    return summed, hidden.new_empty(hidden.shape, dtype=dtype), scales


def empty_gradients(
    grad_normed: Tensor,
    grad_summed: Tensor | None,
    summed: Tensor,
    scales: Tensor,
    weight: Tensor,
    delta_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    apart = delta_dtype not in (None, summed.dtype)
    num_sums = -(-scales.numel() // ROWS_PER_SUM)
    return (
        summed.new_empty(summed.shape),
        summed.new_empty(summed.shape if apart else 0, dtype=delta_dtype),
        weight.new_empty(num_sums, weight.shape[0], dtype=torch.float32),
    )


# The sum (empty without a delta), its norm, and 1 / its root mean square [..].
add_rms_norm_op = operator(
    "add_rms_norm(Tensor hidden, Tensor? delta, Tensor weight, float eps, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    "rms_norm_triton",
    fake=empty_sum_and_norm,
)
# The gradient of the stream, the same in the dtype of the delta if that is another (else empty),
# and that of the weight in sums of `ROWS_PER_SUM` rows.
_add_rms_norm_backward_op = operator(
    "add_rms_norm_backward(Tensor grad_normed, Tensor? grad_summed, Tensor summed, Tensor scales, "
    "Tensor weight, ScalarType? delta_dtype) -> (Tensor, Tensor, Tensor)",
    "rms_norm_triton",
    fake=empty_gradients,
)
