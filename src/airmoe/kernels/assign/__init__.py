"""Tokens to codewords (Alg. 1, lines 2-3)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.assign import reference
from airmoe.kernels.backend import use_triton
from airmoe.kernels.precision import own_precision


@torch.no_grad()
@own_precision
def assign(hidden: Tensor, codewords: Tensor, *, euclidean: bool, count: int = 1) -> Tensor:
    """The `count` nearest codewords of each token, nearest first: [T, count] int64.

    hidden [T, D], codewords [G, D] (unit norm unless `euclidean`). Ties go to the lowest id.
    """
    # The kernel keeps one best codeword; several probes are rare, and no hot path.
    if count == 1 and codewords.dtype == torch.float32 and use_triton(hidden, codewords):
        from airmoe.kernels.assign.operator import nearest_codeword

        return nearest_codeword(hidden, codewords, euclidean).unsqueeze(-1)
    return reference.assign(hidden, codewords, euclidean, count)
