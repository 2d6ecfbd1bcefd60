"""Norms of rows: the projection of centroids (Alg. 1, line 1), and which tokens can be counted."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import Gradient, operator, use_triton, with_kernel


def unit_rows(rows: Tensor) -> Tensor:
    """Projection onto the unit sphere, functional and differentiable: [E, D] -> [E, D].

    The parameter keeps its own norm; a zero row stays zero instead of becoming NaN.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows * _inverse_norms(rows).unsqueeze(-1)


@torch.no_grad()
@with_kernel("norms_triton")
def inverse_norms(rows: Tensor) -> Tensor:
    """1/|w_e| in float32 or wider, 0 for a zero row: [E, D] -> [E], a constant to autograd."""
    return _inverse_norms(rows.to(torch.promote_types(rows.dtype, torch.float32)))


def _inverse_norms(rows: Tensor) -> Tensor:
    square = rows.square().sum(-1)
    safe = square.where(square > 0, torch.ones_like(square))
    return safe.rsqrt() * (square > 0)


def counted_rows(hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """hidden [T, D] with 0 in the rows that do not count, and which do: [T].

    Those of the mask [T] do whose squared norm is a finite float32 number: NaN, infinity and huge
    values would spoil sums that other tokens share.
    """
    if use_triton(hidden):
        return counted_rows_op(hidden, mask)
    # `vector_norm` makes no [T, D] tensor of squares. It does not square a single entry either, so
    # the norm is squared: the sum of squares must be finite, whatever the width.
    norms = torch.linalg.vector_norm(hidden.detach().float(), dim=-1)
    valid = norms.square() < torch.inf
    valid = valid if mask is None else valid & mask
    return torch.where(valid.unsqueeze(-1), hidden, 0), valid


counted_rows_op = operator(
    "counted_rows(Tensor hidden, Tensor? mask) -> (Tensor rows, Tensor valid)",
    "norms_triton",
    fake=lambda hidden, _: (
        hidden.new_empty(hidden.shape),
        hidden.new_empty(hidden.shape[0], dtype=torch.bool),
    ),
    gradient=Gradient(of=("hidden",), saved=("valid",)),
)
