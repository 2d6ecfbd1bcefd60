"""Tokens to codewords (Alg. 1, lines 2-3)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.top_k import top_positions

CHUNK_ELEMENTS = 1 << 22


@torch.no_grad()
@own_precision
def assign(hidden: Tensor, codewords: Tensor, *, euclidean: bool) -> Tensor:
    """The nearest codeword of each token: [T] int64.

    hidden [T, D], codewords [G, D] (unit norm unless `euclidean`). Ties go to the lowest id.
    """
    if codewords.dtype == torch.float32 and use_triton(hidden, codewords):
        from airmoe.kernels.assign_triton import nearest_codeword

        return nearest_codeword(hidden, codewords, euclidean)
    nearest = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    # |h - c|^2 = |h|^2 - 2 (<h, c> - |c|^2 / 2): the token's own norm changes no order.
    offset = codewords.square().sum(-1) / 2 if euclidean else None
    rows = max(1, CHUNK_ELEMENTS // codewords.shape[0])
    for start in range(0, hidden.shape[0], rows):
        similarity = hidden[start : start + rows].to(codewords.dtype) @ codewords.T  # [rows, G]
        if offset is not None:
            similarity -= offset
        nearest[start : start + rows] = top_positions(similarity, 1).squeeze(-1)
    return nearest
