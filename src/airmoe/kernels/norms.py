"""Norms of rows: the projection of centroids (Alg. 1, line 1), and which tokens can be counted."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import with_kernel


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


@torch.no_grad()
@with_kernel("norms_triton")
def finite_rows(hidden: Tensor) -> Tensor:
    """True where the squared norm of a row is a finite float32 number: [T, D] -> [T].

    NaN, infinity and huge values would spoil sums that other tokens share.
    """
    # `vector_norm` makes no [T, D] tensor of squares. It does not square a single entry either, so
    # the norm is squared: the sum of squares must be finite, whatever the width.
    return torch.linalg.vector_norm(hidden.float(), dim=-1).square() < torch.inf
