"""Rows with a finite squared norm."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_rows(hidden: Tensor) -> Tensor:
    # Squares summed without a tensor of them. Of a single entry the norm squares nothing, so it is
    # squared again: the rule is that of the sum.
    return torch.linalg.vector_norm(hidden.float(), dim=-1).square().isfinite()
