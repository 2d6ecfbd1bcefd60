"""The products over lists of rows as operators that compilers and graphs can take in.

`airmoe::gather_dot`, `gather_total` and `scatter_total` are each other's gradients.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from airmoe.kernels.operators import operator
from airmoe.kernels.rows.triton import row_dots, row_sums, row_totals, sort_entries


@operator("airmoe::gather_dot")
def gather_dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """<queries[q], table[ids[q, j]]>: [Q, J] in the dtype of the queries."""
    queries, table, ids = queries.contiguous(), table.contiguous(), ids.contiguous()
    return row_dots(queries, [table], ids, queries.dtype)[0]


@operator("airmoe::gather_total")
def gather_total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """sum_j weights[q, j] * table[ids[q, j]]: [Q, D] in the dtype of the table."""
    pair = weights.contiguous(), table.contiguous()
    return row_totals([pair], ids.contiguous(), table.dtype)


@operator("airmoe::scatter_total")
def scatter_total(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """weights[q, j] * rows[q] summed into row ids[q, j]: [num_out, D] in the dtype of the rows."""
    entries = sort_entries(ids, num_out)
    return row_sums([weights.contiguous()], rows.contiguous(), entries, rows.dtype)[0]


@gather_dot.register_fake
def _(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return queries.new_empty(ids.shape)


@gather_total.register_fake
def _(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    return table.new_empty(ids.shape[0], table.shape[1])


@scatter_total.register_fake
def _(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    return rows.new_empty(num_out, rows.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _dot_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    queries, table, ids = ctx.saved_tensors
    grad_queries = grad_table = None
    if ctx.needs_input_grad[0]:
        grad_queries = gather_total(grad, table.to(grad.dtype), ids)
    if ctx.needs_input_grad[1]:
        grad_table = scatter_total(grad, queries, ids, table.shape[0]).to(table.dtype)
    return grad_queries, grad_table, None


def _total_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    weights, table, ids = ctx.saved_tensors
    grad_weights = grad_table = None
    if ctx.needs_input_grad[0]:
        grad_weights = gather_dot(grad, table, ids).to(weights.dtype)
    if ctx.needs_input_grad[1]:
        grad_table = scatter_total(weights, grad, ids, table.shape[0])
    return grad_weights, grad_table, None


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    weights, rows, ids = ctx.saved_tensors
    grad_weights = grad_rows = None
    if ctx.needs_input_grad[0]:
        grad_weights = gather_dot(rows, grad, ids).to(weights.dtype)
    if ctx.needs_input_grad[1]:
        grad_rows = gather_total(weights, grad, ids)
    return grad_weights, grad_rows, None, None


gather_dot.register_autograd(_dot_backward, setup_context=_save)
gather_total.register_autograd(_total_backward, setup_context=_save)
scatter_total.register_autograd(_scatter_backward, setup_context=_save)
