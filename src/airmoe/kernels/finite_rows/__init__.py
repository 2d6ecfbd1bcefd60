"""Which tokens can be counted: NaN, infinity and huge values would spoil sums that others share."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.finite_rows import reference


@torch.no_grad()
def finite_rows(hidden: Tensor) -> Tensor:
    """True where the squared norm of a row is a finite float32 number: [T, D] -> [T]."""
    if use_triton(hidden):
        from airmoe.kernels.finite_rows.triton import finite_rows_op

        return finite_rows_op(hidden.detach())
    return reference.finite_rows(hidden.detach())
