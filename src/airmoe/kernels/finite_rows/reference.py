"""Rows with a finite squared norm."""

from __future__ import annotations

from torch import Tensor


def finite_rows(hidden: Tensor) -> Tensor:
    return hidden.float().square().sum(-1).isfinite()
