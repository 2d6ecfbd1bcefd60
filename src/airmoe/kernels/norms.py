"""Norms of rows: the projection of centroids (Alg. 1, line 1), and which tokens can be counted."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import operator, use_triton


def unit_rows(rows: Tensor) -> Tensor:
    """Projection onto the unit sphere, functional and differentiable: [E, D] -> [E, D].

    The parameter keeps its own norm; a zero row stays zero instead of becoming NaN.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows * inverse_norms(rows, gradient=True).unsqueeze(-1)


def inverse_norms(rows: Tensor, *, gradient: bool = False) -> Tensor:
    """1/|w_e| in float32 or wider, 0 for a zero row: [E, D] -> [E].

    It is a constant to autograd unless a `gradient` is asked for, which plain PyTorch gives.
    """
    if not gradient:
        rows = rows.detach()
        if use_triton(rows):
            return inverse_norms_op(rows)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    square = rows.square().sum(-1)
    safe = square.where(square > 0, torch.ones_like(square))
    return safe.rsqrt() * (square > 0)


inverse_norms_op = operator(
    "inverse_norms(Tensor rows) -> Tensor",
    "norms_triton",
    fake=lambda rows: rows.new_empty(rows.shape[0], dtype=torch.float32),
)


@torch.no_grad()
def finite_rows(hidden: Tensor) -> Tensor:
    """True where the squared norm of a row is a finite float32 number: [T, D] -> [T].

    NaN, infinity and huge values would spoil sums that other tokens share.
    """
    if use_triton(hidden):
        return finite_rows_op(hidden.detach())
    # `vector_norm` makes no [T, D] tensor of squares. It does not square a single entry either, so
    # the norm is squared: the sum of squares must be finite, whatever the width.
    return torch.linalg.vector_norm(hidden.detach().float(), dim=-1).square().isfinite()


finite_rows_op = operator(
    "finite_rows(Tensor hidden) -> Tensor",
    "norms_triton",
    fake=lambda hidden: hidden.new_empty(hidden.shape[0], dtype=torch.bool),
)
