"""Rows with a finite squared norm."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_rows(hidden: Tensor) -> Tensor:
    # The norm sums squares without a tensor of them, and is finite where their sum is.
    return torch.linalg.vector_norm(hidden.float(), dim=-1).isfinite()
