"""Products over per-token (or per-expert) id lists, differentiable, nothing of size T * K * D.

What PEER, exact top-K and expert choice run on: their rows share no pool, so there are no cells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import use_triton
from airmoe.kernels.precision import own_precision
from airmoe.kernels.rows import reference


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(queries, table, ids)
        return reference.dot(queries, table, ids)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        queries, table, ids = ctx.saved_tensors
        grad_queries = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_queries = reference.total(grad, table.to(grad.dtype), ids)
        if ctx.needs_input_grad[1]:
            grad_table = reference.scatter(grad, queries, ids, table.shape[0]).to(table.dtype)
        return grad_queries, grad_table, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(weights, table, ids)
        return reference.total(weights, table, ids)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, table, ids = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weights = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_weights = reference.dot(grad, table, ids).to(weights.dtype)
        if ctx.needs_input_grad[1]:
            grad_table = reference.scatter(weights, grad, ids, table.shape[0])
        return grad_weights, grad_table, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
        ctx.save_for_backward(weights, rows, ids)
        return reference.scatter(weights, rows, ids, num_out)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weights, rows, ids = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weights = grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_weights = reference.dot(rows, grad, ids).to(weights.dtype)
        if ctx.needs_input_grad[1]:
            grad_rows = reference.total(weights, grad, ids)
        return grad_weights, grad_rows, None, None


@own_precision
def gather_dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """<queries[q], table[ids[q, j]]>: [Q, D], [R, D], [Q, J] -> [Q, J]."""
    if use_triton(queries, table, ids):
        from airmoe.kernels.rows import operator

        return operator.gather_dot(queries, table, ids)
    return _Dot.apply(queries, table, ids)  # type: ignore[no-any-return]


@own_precision
def gather_total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """sum_j weights[q, j] * table[ids[q, j]]: [Q, J], [R, D], [Q, J] -> [Q, D]."""
    if use_triton(weights, table, ids):
        from airmoe.kernels.rows import operator

        return operator.gather_total(weights, table, ids)
    return _Total.apply(weights, table, ids)  # type: ignore[no-any-return]


@own_precision
def scatter_total(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """Add weights[q, j] * rows[q] into row ids[q, j] of the result: -> [num_out, D]."""
    if use_triton(weights, rows, ids):
        from airmoe.kernels.rows import operator

        return operator.scatter_total(weights, rows, ids, num_out)
    return _Scatter.apply(weights, rows, ids, num_out)  # type: ignore[no-any-return]
