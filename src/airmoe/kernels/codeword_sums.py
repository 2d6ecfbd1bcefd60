"""What a codebook learns from: the sum of the tokens of each codeword (Alg. 2, lines 2-5)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton


def directions(rows: Tensor) -> Tensor:
    """Rows on the unit sphere however small they are (sums fade without end); 0 stays 0."""
    largest = rows.abs().amax(-1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1.0)
    norms = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1.0)


@torch.no_grad()
def codeword_sums(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, *, spherical: bool
) -> Tensor:
    """hidden [T, D] (0 where not `valid`), codeword_ids [T] -> [G, D + 1] float32.

    The last column is the number of valid tokens. Where `spherical`, tokens enter by direction.
    """
    if use_triton(hidden):
        from airmoe.kernels.codeword_sums_triton import codeword_sums_op

        return codeword_sums_op(hidden.detach(), valid, codeword_ids, num_codewords, spherical)
    states = hidden.float()
    if spherical:
        states = directions(states)
    counted = torch.cat([states, valid.float().unsqueeze(-1)], dim=-1)
    sums = counted.new_zeros(num_codewords, counted.shape[1])
    return sums.index_add_(0, codeword_ids, counted)
