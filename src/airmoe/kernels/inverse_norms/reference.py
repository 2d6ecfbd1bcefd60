"""Rows on the unit sphere: what a projected centroid is, for routers and references alike."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_rows(rows: Tensor) -> Tensor:
    """Projection onto the unit sphere (Alg. 1, line 1), functional and differentiable.

    The parameter keeps its own norm; a zero row stays zero instead of becoming NaN.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return rows * inverse_norms(rows).unsqueeze(-1)


def inverse_norms(rows: Tensor) -> Tensor:
    """1/|w_e| in float32 or wider, 0 for a zero row: [E, D] -> [E]."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    square = rows.square().sum(-1)
    safe = square.where(square > 0, torch.ones_like(square))
    return safe.rsqrt() * (square > 0)
