"""What a codebook learns from: the sum of the tokens of each codeword (Alg. 2, lines 2-5)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.codeword_sums import reference
from airmoe.kernels.codeword_sums.reference import directions


@torch.no_grad()
def codeword_sums(
    hidden: Tensor, valid: Tensor, codeword_ids: Tensor, num_codewords: int, *, spherical: bool
) -> Tensor:
    """hidden [T, D] (0 where not `valid`), codeword_ids [T] -> [G, D + 1] float32.

    The last column is the number of valid tokens. Where `spherical`, tokens enter by direction.
    """
    if use_triton(hidden):
        from airmoe.kernels.codeword_sums.triton import codeword_sums_op

        return codeword_sums_op(hidden.detach(), valid, codeword_ids, num_codewords, spherical)
    return reference.codeword_sums(hidden, valid, codeword_ids, num_codewords, spherical)


__all__ = ["codeword_sums", "directions"]
