"""The inverted index: the M best experts of each codeword, tile by tile.

A tile is some codewords times some experts; the best keys so far compete with those of the next
tile, so that [G, E] never exists and the expert table is read once per block of codewords.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.noise import Noise
from airmoe.kernels.select.reference import key_positions, selection_keys

CODEWORDS_PER_TILE = 256
TILE_ELEMENTS = 1 << 22


def top_m(
    codewords: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    size: int,
    noise: Noise | None,
    out: Tensor,
) -> Tensor:
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
