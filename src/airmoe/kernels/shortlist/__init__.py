"""Shortlists (Alg. 1, lines 4-7): codeword -> its M best experts."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.noise import Noise
from airmoe.kernels.precision import own_precision
from airmoe.kernels.shortlist import reference


@torch.no_grad()
@own_precision
def top_m(
    codewords: Tensor,
    centroids: Tensor,
    size: int,
    *,
    inverse_norms: Tensor | None = None,
    noise: Noise | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The `size` experts with the largest <c_g, w_e> + jitter: [G, size] ascending ids.

    codewords [G, D], centroids [E, D]. Written into `out` where given (a fixed address). Ties go
    to the lowest id. Memory is bounded whatever E and G.
    """
    if out is None:
        out = torch.empty(codewords.shape[0], size, dtype=torch.int64, device=codewords.device)
    if codewords.dtype == torch.float32 and use_triton(codewords, centroids, inverse_norms):
        from airmoe.kernels.shortlist.triton import plan_cuts, top_m_op

        if plan_cuts(centroids.shape[0], size) is not None:
            keys, std = (None, 0.0) if noise is None else (noise.row_keys, noise.std)
            top_m_op(codewords, centroids, inverse_norms, keys, std, out)
            return out
    return reference.top_m(codewords, centroids, inverse_norms, size, noise, out)
