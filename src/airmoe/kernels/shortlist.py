"""Shortlists (Alg. 1, lines 4-7), the inverted index: codeword -> its M best experts."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.noise import Noise, noise_operands
from airmoe.kernels.top_k import key_positions, selection_keys

CODEWORDS_PER_TILE = 256
TILE_ELEMENTS = 1 << 22


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
    to the lowest id. Memory is bounded whatever E and G: a tile is some codewords times some
    experts, and the best keys so far compete with those of the next tile.
    """
    if out is None:
        out = torch.empty(codewords.shape[0], size, dtype=torch.int64, device=codewords.device)
    if codewords.dtype == torch.float32 and use_triton(codewords, centroids, inverse_norms):
        from airmoe.kernels.shortlist_triton import plan_cuts, top_m_op

        if plan_cuts(centroids.shape[0], size) is not None:
            top_m_op(codewords, centroids, inverse_norms, *noise_operands(noise), out)
            return out
    num_experts = centroids.shape[0]
    rows = min(CODEWORDS_PER_TILE, codewords.shape[0])
    # At least a few times the shortlist, or the merging would cost more than the scoring.
    columns = max(TILE_ELEMENTS // rows, 4 * size)
    for start in range(0, codewords.shape[0], rows):
        chunk = slice(start, start + rows)
        best = torch.empty(codewords[chunk].shape[0], 0, dtype=torch.int64, device=codewords.device)
        for first in range(0, num_experts, columns):
            tile = slice(first, first + columns)
            scores = codewords[chunk] @ centroids[tile].to(codewords.dtype).T  # [rows, columns]
            if inverse_norms is not None:
                scores *= inverse_norms[tile]
            if noise is not None:
                experts = torch.arange(first, first + scores.shape[1], device=scores.device)
                scores += noise.rows(chunk, experts)
            best = torch.cat([best, selection_keys(scores, first, num_experts)], dim=-1)
            if best.shape[1] > size:
                best = best.topk(size, dim=-1, sorted=False).values
        out[chunk] = key_positions(best, num_experts).sort(-1).values
    return out
