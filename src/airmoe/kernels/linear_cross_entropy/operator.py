"""`airmoe::linear_cross_entropy`: the Triton path as an operator for compilers and graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.linear_cross_entropy.reference import scaled_gradients
from airmoe.kernels.linear_cross_entropy.triton import gradient_dtype, loss_and_gradients
from airmoe.kernels.operators import operator


@operator("airmoe::linear_cross_entropy")
def linear_cross_entropy_op(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss and the gradients of hidden and weight, for a factor of 1; empty if unwanted.

    A label on a GPU that is neither a word nor `ignore_index` makes all three NaN.
    """
    result = loss_and_gradients(hidden, weight, labels, ignore_index, dtype, *wanted)
    return (
        result.loss,
        hidden.new_empty(0) if result.hidden is None else result.hidden,
        hidden.new_empty(0) if result.weight is None else result.weight,
    )


@linear_cross_entropy_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    none = hidden.new_empty(0)
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape, dtype=gradient_dtype(dtype)) if wanted[0] else none,
        weight.new_empty(weight.shape, dtype=torch.float32) if wanted[1] else hidden.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, wanted = inputs
    _loss, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.wanted = wanted
    ctx.save_for_backward(grad_hidden, grad_weight)


def _autograd(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = (
        saved if want else None for saved, want in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    )
    return *scaled_gradients(grad, gradients, ctx.dtypes), None, None, None, None


linear_cross_entropy_op.register_autograd(_autograd, setup_context=_setup)


def run(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    wanted: list[bool],
) -> Tensor:
    """`linear_cross_entropy` on Triton: the summed loss, a float32 scalar."""
    return linear_cross_entropy_op(hidden, weight, labels, ignore_index, dtype, wanted)[0]
