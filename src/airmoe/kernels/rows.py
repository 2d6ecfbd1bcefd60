"""Products over per-token (or per-expert) id lists, differentiable, nothing of size T * K * D.

What PEER, exact top-K and expert choice run on: their rows share no pool, so there are no cells.
Dot, weighted sum and scatter are each other's gradients:

  dot[q, j]     = <queries[q], table[ids[q, j]]>
  total[q]      = sum_j weights[q, j] * table[ids[q, j]]
  scattered[i]  = sum over all (q, j) with ids[q, j] = i of weights[q, j] * rows[q]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import own_precision, use_triton

CHUNK_ELEMENTS = 1 << 17  # gathered elements held at once in `_dot`: half a megabyte stays in cache


@own_precision
def gather_dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """<queries[q], table[ids[q, j]]>: [Q, D], [R, D], [Q, J] -> [Q, J]."""
    if use_triton(queries, table, ids):
        from airmoe.kernels.rows_triton import gather_dot_op

        return gather_dot_op(queries, table, ids)
    return _Dot.apply(queries, table, ids)  # type: ignore[no-any-return]


@own_precision
def gather_total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """sum_j weights[q, j] * table[ids[q, j]]: [Q, J], [R, D], [Q, J] -> [Q, D]."""
    if use_triton(weights, table, ids):
        from airmoe.kernels.rows_triton import gather_total_op

        return gather_total_op(weights, table, ids)
    return _Total.apply(weights, table, ids)  # type: ignore[no-any-return]


@own_precision
def scatter_total(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """Add weights[q, j] * rows[q] into row ids[q, j] of the result: -> [num_out, D]."""
    if use_triton(weights, rows, ids):
        from airmoe.kernels.rows_triton import scatter_total_op

        return scatter_total_op(weights, rows, ids, num_out)
    return _Scatter.apply(weights, rows, ids, num_out)  # type: ignore[no-any-return]


def _dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    result = torch.empty(ids.shape, dtype=queries.dtype, device=queries.device)
    step = max(1, CHUNK_ELEMENTS // max(1, ids.shape[1] * queries.shape[1]))
    for start in range(0, ids.shape[0], step):
        part = slice(start, start + step)
        rows = table.index_select(0, ids[part].flatten()).to(queries.dtype)
        rows = rows.view(*ids[part].shape, queries.shape[1])  # [step, J, D]
        result[part] = torch.bmm(rows, queries[part].unsqueeze(-1)).squeeze(-1)
    return result


def _total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if ids.numel() == 0:
        return torch.zeros(ids.shape[0], table.shape[1], dtype=table.dtype, device=table.device)
    return F.embedding_bag(ids, table, per_sample_weights=weights.to(table.dtype), mode="sum")


def _scatter(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """Summed in a fixed order."""
    if ids.numel() == 0:
        return torch.zeros(num_out, rows.shape[1], dtype=rows.dtype, device=rows.device)
    targets, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(num_out, device=ids.device)
    return F.embedding_bag(
        order.div(ids.shape[1], rounding_mode="floor"),
        rows,
        torch.searchsorted(targets, bounds),
        per_sample_weights=weights.flatten()[order].to(rows.dtype),
        mode="sum",
    )


@dataclass(frozen=True)
class Products:
    """The three products by one backend, and their gradients by the same."""

    dot: Callable[..., Tensor]
    total: Callable[..., Tensor]
    scatter: Callable[..., Tensor]

    def dot_backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        queries, table, ids = ctx.saved_tensors
        grad_queries = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_queries = self.total(grad, table.to(grad.dtype), ids)
        if ctx.needs_input_grad[1]:
            grad_table = self.scatter(grad, queries, ids, table.shape[0]).to(table.dtype)
        return grad_queries, grad_table, None

    def total_backward(self, ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, table, ids = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weights = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_weights = self.dot(grad, table, ids).to(weights.dtype)
        if ctx.needs_input_grad[1]:
            grad_table = self.scatter(weights, grad, ids, table.shape[0])
        return grad_weights, grad_table, None

    def scatter_backward(
        self, ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        weights, rows, ids = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weights = grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_weights = self.dot(rows, grad, ids).to(weights.dtype)
        if ctx.needs_input_grad[1]:
            grad_rows = self.total(weights, grad, ids)
        return grad_weights, grad_rows, None, None


_PLAIN = Products(_dot, _total, _scatter)


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(queries, table, ids)
        return _dot(queries, table, ids)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _PLAIN.dot_backward(ctx, grad)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(weights, table, ids)
        return _total(weights, table, ids)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _PLAIN.total_backward(ctx, grad)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
        ctx.save_for_backward(weights, rows, ids)
        return _scatter(weights, rows, ids, num_out)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _PLAIN.scatter_backward(ctx, grad)
