"""Sums of token directions by codeword."""

from __future__ import annotations

import torch
from torch import Tensor


def directions(rows: Tensor) -> Tensor:
    """Rows on the unit sphere however small they are (sums fade without end); 0 stays 0."""
    largest = rows.abs().amax(-1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1.0)
    norms = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1.0)


def codeword_sums(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, spherical: bool
) -> Tensor:
    states = hidden.float()
    if spherical:
        states = directions(states)
    counted = torch.cat([states, valid.float().unsqueeze(-1)], dim=-1)
    sums = counted.new_zeros(num_codewords, counted.shape[1])
    return sums.index_add_(0, codeword_ids, counted)
