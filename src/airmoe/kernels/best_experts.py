"""The best of a product of two tables, exact and without the whole product in memory.

Codeword -> its M best experts (shortlists, the inverted index), token -> its K best experts, and
expert -> its best tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe.kernels.backend import chunks, operator, own_precision, use_triton
from airmoe.kernels.noise import Noise, noise_operands
from airmoe.kernels.norms import inverse_norms
from airmoe.kernels.top_k import LONGEST_LIST, POSITION, selection_keys, top_positions

CHUNK_ELEMENTS = 1 << 22  # scores of a tile
CODEWORDS_PER_TILE = 256


@torch.no_grad()
@own_precision
def top_m(
    codewords: Tensor,
    centroids: Tensor,
    size: int,
    *,
    inverse_norms: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    """Shortlists (Alg. 1, lines 4-7): the `size` experts with the largest <c_g, w_e> + jitter.

    codewords [G, D], centroids [E, D] -> [G, size] ascending ids, ties to the lowest. Products are
    as exact as float32 unless both have 16 bits. Memory is bounded whatever E and G.
    """
    fits = codewords.dtype in (torch.float32, centroids.dtype)
    if fits and size <= LONGEST_LIST and use_triton(codewords, centroids):
        return top_m_op(codewords, centroids, size, inverse_norms, *noise_operands(noise))
    codewords = codewords.to(torch.promote_types(codewords.dtype, torch.float32))
    rows = min(CODEWORDS_PER_TILE, codewords.shape[0])
    # At least a few times the shortlist, or the merging would cost more than the scoring.
    tile = rows, max(CHUNK_ELEMENTS // rows, 4 * size)
    return _best_columns(codewords, centroids, size, tile, inverse_norms, noise, ordered=False)


def _best_columns(
    left: Tensor,
    right: Tensor,
    count: int,
    tile: tuple[int, int],
    scales: Tensor | None,
    noise: Noise | None,
    *,
    ordered: bool,
) -> Tensor:
    """The rows of `right` with the largest scaled products + jitter for each row of `left`.

    The best keys of the tiles so far compete with those of the next one. Products are in the dtype
    of `left`.
    """
    ids = torch.empty(left.shape[0], count, dtype=torch.int64, device=left.device)
    num_columns = right.shape[0]
    looks = left.device.type == "cpu" and not torch.compiler.is_compiling()  # without waiting
    for rows in chunks(left.shape[0], tile[0]):
        best = ids[rows, :0]
        for columns in chunks(num_columns, tile[1]):
            # Not changed in place: selective activation checkpointing may keep the product.
            scores = left[rows] @ right[columns].to(left.dtype).T  # [rows, columns]
            if scales is not None:
                scores = scores * scales[columns]
            places = torch.arange(columns.start, columns.stop, device=left.device)
            if noise is not None:
                scores = scores + noise.rows(rows, places)
            scores = scores.float()
            if looks and count < scores.shape[1]:
                # Keys of the tile's best alone, unless equal scores leave a choice.
                some, positions = scores.topk(count, dim=-1, sorted=False)
                clear = (scores >= some.amin(-1, keepdim=True)).sum(-1) == count
                scores, places = (some, places[positions]) if clear.all() else (scores, places)
            keys = selection_keys(scores, places, num_columns)
            best = keys if columns.start == 0 else torch.cat([best, keys], dim=-1)
            best = best.topk(min(count, best.shape[1]), dim=-1, sorted=ordered).values
        ids[rows] = num_columns - 1 - (best & POSITION)
    return ids if ordered else ids.sort(-1).values


def _empty_ids(left: Tensor, _right: Tensor, count: int, *_: Any) -> Tensor:
    return left.new_empty(left.shape[0], count, dtype=torch.int64)


top_m_op = operator(
    "top_m(Tensor codewords, Tensor centroids, SymInt size, Tensor? inverse_norms, "
    "Tensor? row_keys, float noise_std) -> Tensor",
    "best_columns_triton",
    fake=_empty_ids,
)


@torch.no_grad()
@own_precision
def best_experts(
    hidden: Tensor,
    experts: Tensor,
    count: int,
    noise: Noise | None = None,
    *,
    normalize: bool = False,
) -> Tensor:
    """Each token's `count` best experts: hidden [T, D], experts [E, D] -> [T, count] ids.

    With `normalize` logits are <h, w_e> / |w_e|, 0 for a zero row. Best first, and of equal ones
    the lowest id. Operands may differ in dtype; scores are float32 (or wider) whatever they are,
    and no copy of the experts is made for it.
    """
    if count <= LONGEST_LIST and use_triton(hidden, experts):
        return best_experts_op(hidden, experts, count, *noise_operands(noise), normalize)
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    num_experts, few = experts.shape[0], max(1, CHUNK_ELEMENTS // max(1, experts.shape[1]))
    scales = None
    if normalize:
        scales = torch.cat([inverse_norms(experts[part]) for part in chunks(num_experts, few)])
    whole = hidden.dtype == experts.dtype == work  # else a copy is made of some at a time
    tile = max(1, CHUNK_ELEMENTS // num_experts), num_experts if whole else few
    return _best_columns(hidden.to(work), experts, count, tile, scales, noise, ordered=True)


best_experts_op = operator(
    "best_experts(Tensor hidden, Tensor experts, SymInt count, Tensor? row_keys, float noise_std, "
    "bool normalize) -> Tensor",
    "best_experts_triton",
    fake=_empty_ids,
)


@torch.no_grad()
@own_precision
def best_tokens(
    hidden: Tensor,
    experts: Tensor,
    log_z: Tensor,
    valid: Tensor,
    count: int,
    noise: Noise | None = None,
) -> Tensor:
    """Each expert's `count` best valid tokens by softmax probability: -> [E, count] ids.

    Best first, valid tokens before the others.
    """
    ids = torch.empty(experts.shape[0], count, dtype=torch.int64, device=hidden.device)
    tokens = torch.arange(hidden.shape[0], device=hidden.device)
    for chunk in chunks(experts.shape[0], max(1, CHUNK_ELEMENTS // max(1, hidden.shape[0]))):
        logits = experts[chunk] @ hidden.T - log_z  # [chunk, T] log-probabilities
        if noise is not None:
            columns = torch.arange(chunk.start, chunk.stop, device=hidden.device)
            logits += noise.pairs(tokens, columns.unsqueeze(-1))
        ids[chunk] = top_positions(logits.masked_fill_(~valid, -torch.inf), count)
    return ids
