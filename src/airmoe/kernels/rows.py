"""Products over per-token (or per-expert) id lists, differentiable, nothing of size T * K * D.

What PEER, exact top-K and expert choice run on: their rows share no pool, so there are no cells.
Dot, weighted sum and scatter are each other's gradients:

  dot[q, j]     = <queries[q], table[ids[q, j]]>
  total[q]      = sum_j weights[q, j] * table[ids[q, j]]
  scattered[i]  = sum over all (q, j) with ids[q, j] = i of weights[q, j] * rows[q]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import (
    Gradient,
    chunks,
    operator,
    own_precision,
    use_triton,
    with_kernel,
)
from airmoe.kernels.norms import unit_rows

CHUNK_ELEMENTS = 1 << 17  # gathered elements held at once in `_dot`: half a megabyte stays in cache


def gather_dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """<queries[q], table[ids[q, j]]>: [Q, D], [R, D], [Q, J] -> [Q, J]."""
    return _multiply("dot", queries, table, ids)


def gather_total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """sum_j weights[q, j] * table[ids[q, j]]: [Q, J], [R, D], [Q, J] -> [Q, D]."""
    return _multiply("total", weights, table, ids)


def scatter_total(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """Add weights[q, j] * rows[q] into row ids[q, j] of the result: -> [num_out, D]."""
    return _multiply("scatter", weights, rows, ids, num_out)


@own_precision
@with_kernel(
    "rows_triton",
    fake=lambda hidden, _, ids, *__: hidden.new_empty(ids.shape, dtype=torch.float32),
    gradient=Gradient(of=("hidden", "experts")),
)
def chosen_logits(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """<h_t, w_id>, with `normalize` divided by |w_id|: [T, K], float32 or wider.

    hidden [T, D], experts [E, D], ids [T, K]. A zero row gives 0. The gradient goes through the
    norm; gradients are in the dtype of their operand. Operands may differ in dtype.
    """
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    rows = unit_rows(experts) if normalize else experts
    return gather_dot(hidden.to(work), rows.to(work), ids)


@own_precision
def _multiply(product: str, left: Tensor, rows: Tensor, ids: Tensor, *num_out: int) -> Tensor:
    if use_triton(left, rows, ids):
        return _TRITON[product](left, rows, ids, *num_out)
    return _Product.apply(left, rows, ids, product, *num_out)  # type: ignore[no-any-return]


def _dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    result = torch.empty(ids.shape, dtype=queries.dtype, device=queries.device)
    step = max(1, CHUNK_ELEMENTS // max(1, ids.shape[1] * queries.shape[1]))
    for part in chunks(ids.shape[0], step):
        rows = table.index_select(0, ids[part].flatten()).to(queries.dtype)
        rows = rows.view(*ids[part].shape, queries.shape[1])  # [step, J, D]
        result[part] = torch.bmm(rows, queries[part].unsqueeze(-1)).squeeze(-1)
    return result


def _total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if ids.numel() == 0:
        return torch.zeros(ids.shape[0], table.shape[1], dtype=table.dtype, device=table.device)
    return F.embedding_bag(ids, table, per_sample_weights=weights.to(table.dtype), mode="sum")


def _scatter(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """Each row of the result is summed in a fixed order."""
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


def _gradients(
    product: str, by: dict[str, Callable[..., Tensor]], ctx: Any, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of one product, computed with the other two; `by` has those of one backend."""
    left, rows, ids = ctx.saved_tensors
    want_left, want_rows, *others = ctx.needs_input_grad
    grad, grad_left, grad_rows = grad.contiguous(), None, None
    if product == "dot":
        if want_left:
            grad_left = by["total"](grad, rows.to(grad.dtype), ids)
        if want_rows:
            grad_rows = by["scatter"](grad, left, ids, rows.shape[0]).to(rows.dtype)
    elif product == "total":
        if want_left:
            grad_left = by["dot"](grad, rows, ids).to(left.dtype)
        if want_rows:
            grad_rows = by["scatter"](left, grad, ids, rows.shape[0])
    else:
        if want_left:
            grad_left = by["dot"](rows, grad, ids).to(left.dtype)
        if want_rows:
            grad_rows = by["total"](left, grad, ids)
    return grad_left, grad_rows, *(None for _ in others)


_PLAIN: dict[str, Callable[..., Tensor]] = {"dot": _dot, "total": _total, "scatter": _scatter}


class _Product(torch.autograd.Function):
    """One of the three in plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, rows: Tensor, ids: Tensor, product: str, *num_out: int
    ) -> Tensor:
        ctx.save_for_backward(left, rows, ids)
        ctx.product = product
        return _PLAIN[product](left, rows, ids, *num_out)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx.product, _PLAIN, ctx, grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


_TRITON: dict[str, Any] = {
    "dot": operator(
        "gather_dot(Tensor queries, Tensor table, Tensor ids) -> Tensor",
        "rows_triton",
        fake=lambda queries, _, ids: queries.new_empty(ids.shape),
    ),
    "total": operator(
        "gather_total(Tensor weights, Tensor table, Tensor ids) -> Tensor",
        "rows_triton",
        fake=lambda _, table, ids: table.new_empty(ids.shape[0], table.shape[1]),
    ),
    "scatter": operator(
        "scatter_total(Tensor weights, Tensor rows, Tensor ids, SymInt num_out) -> Tensor",
        "rows_triton",
        fake=lambda _, rows, ids, num_out: rows.new_empty(num_out, rows.shape[1]),
    ),
}
for _name, _op in _TRITON.items():
    _op.register_autograd(partial(_gradients, _name, _TRITON), setup_context=_save)
