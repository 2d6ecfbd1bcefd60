"""What a codebook computes: the codeword of each token, and the sums that codewords learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import chunks, operator, own_precision, use_triton

CHUNK_ELEMENTS = 1 << 22


@torch.no_grad()
@own_precision
def assign(hidden: Tensor, codewords: Tensor, *, euclidean: bool) -> Tensor:
    """The nearest codeword of each token: [T] int64 (Alg. 1, lines 2-3).

    hidden [T, D], codewords [G, D] (unit norm unless `euclidean`). Ties go to the lowest id.
    """
    if codewords.dtype == torch.float32 and use_triton(hidden, codewords):
        return nearest_codeword(hidden, codewords, euclidean)
    nearest = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    # |h - c|^2 = |h|^2 - 2 (<h, c> - |c|^2 / 2): the token's own norm changes no order.
    offset = codewords.square().sum(-1) / 2 if euclidean else None
    for rows in chunks(hidden.shape[0], max(1, CHUNK_ELEMENTS // codewords.shape[0])):
        similarity = hidden[rows].to(codewords.dtype) @ codewords.T  # [rows, G]
        if offset is not None:
            similarity -= offset
        nearest[rows] = similarity.argmax(-1)  # of equal ones the first
    return nearest


nearest_codeword = operator(
    "nearest_codeword(Tensor hidden, Tensor codewords, bool euclidean) -> Tensor",
    "codewords_triton",
    fake=lambda hidden, *_: hidden.new_empty(hidden.shape[0], dtype=torch.int64),
)


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

    The sum of each codeword's tokens (Alg. 2, lines 2-5), by direction where `spherical`; the last
    column is the number of valid tokens.
    """
    if use_triton(hidden):
        return codeword_sums_op(hidden.detach(), valid, codeword_ids, num_codewords, spherical)
    states = hidden.float()
    if spherical:
        states = directions(states)
    counted = torch.cat([states, valid.float().unsqueeze(-1)], dim=-1)
    sums = counted.new_zeros(num_codewords, counted.shape[1])
    return sums.index_add_(0, codeword_ids, counted)


codeword_sums_op = operator(
    "codeword_sums(Tensor hidden, Tensor valid, Tensor codeword_ids, SymInt num_codewords, "
    "bool spherical) -> Tensor",
    "codewords_triton",
    fake=lambda hidden, valid, ids, count, _: hidden.new_empty(
        count, hidden.shape[1] + 1, dtype=torch.float32
    ),
)
