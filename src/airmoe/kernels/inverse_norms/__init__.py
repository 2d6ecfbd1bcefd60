"""1/|w| of the rows of a table: what projects centroids without a copy of them (Alg. 1, line 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.inverse_norms import reference
from airmoe.kernels.inverse_norms.reference import unit_rows


@torch.no_grad()
def inverse_norms(rows: Tensor) -> Tensor:
    """1/|w_e| in float32 or wider, 0 for a zero row: [E, D] -> [E], without a gradient."""
    if use_triton(rows):
        from airmoe.kernels.inverse_norms.triton import inverse_norms_op

        return inverse_norms_op(rows)
    return reference.inverse_norms(rows)


__all__ = ["inverse_norms", "unit_rows"]
