"""Tokens to codewords (Alg. 1, lines 2-3)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.assign import reference
from airmoe.kernels.precision import own_precision


@torch.no_grad()
@own_precision
def assign(hidden: Tensor, codewords: Tensor, *, euclidean: bool, count: int = 1) -> Tensor:
    """The `count` nearest codewords of each token, nearest first: [T, count] int64.

    hidden [T, D], codewords [G, D] (unit norm unless `euclidean`). Ties go to the lowest id.
    """
    return reference.assign(hidden, codewords, euclidean, count)
