"""Nearest codewords of each token, in chunks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.select.reference import top_positions

CHUNK_ELEMENTS = 1 << 22


def assign(hidden: Tensor, codewords: Tensor, euclidean: bool, count: int) -> Tensor:
    nearest = torch.empty(hidden.shape[0], count, dtype=torch.int64, device=hidden.device)
    # |h - c|^2 = |h|^2 - 2 (<h, c> - |c|^2 / 2): the token's own norm changes no order.
    offset = codewords.square().sum(-1) / 2 if euclidean else None
    rows = max(1, CHUNK_ELEMENTS // codewords.shape[0])
    for start in range(0, hidden.shape[0], rows):
        similarity = hidden[start : start + rows].to(codewords.dtype) @ codewords.T  # [rows, G]
        if offset is not None:
            similarity -= offset
        nearest[start : start + rows] = top_positions(similarity, count)
    return nearest
