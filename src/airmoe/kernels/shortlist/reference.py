"""The inverted index: the M best experts of each codeword, a few codewords at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.noise import Noise
from airmoe.kernels.select.reference import top_positions

CHUNK_ELEMENTS = 1 << 22  # scores held at once: [G, E] never exists in full


def top_m(
    codewords: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    size: int,
    noise: Noise | None,
    out: Tensor,
) -> Tensor:
    num_experts = centroids.shape[0]
    experts = torch.arange(num_experts, device=centroids.device)
    candidates = centroids.to(codewords.dtype)
    rows = max(1, CHUNK_ELEMENTS // num_experts)
    for start in range(0, codewords.shape[0], rows):
        chunk = slice(start, start + rows)
        scores = codewords[chunk] @ candidates.T  # [rows, E]
        if inverse_norms is not None:
            scores *= inverse_norms
        if noise is not None:
            scores += noise.rows(chunk, experts)
        out[chunk] = top_positions(scores, size, ordered=False).sort(-1).values
    return out
