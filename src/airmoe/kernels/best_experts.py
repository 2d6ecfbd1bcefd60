"""The best of a product of two tables, exact and without the whole product in memory.

Codeword -> its M best experts (shortlists, the inverted index), token -> its K best experts, and
expert -> its best tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import operator, own_precision, use_triton
from airmoe.kernels.noise import Noise, noise_of, noise_operands
from airmoe.kernels.norms import inverse_norms
from airmoe.kernels.top_k import POSITION, selection_keys, top_positions

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

    codewords [G, D], centroids [E, D] -> [G, size] ascending ids, ties to the lowest. Memory is
    bounded whatever E and G: a tile is some codewords times some experts, and the best keys so far
    compete with those of the next tile.
    """
    if codewords.dtype == torch.float32 and use_triton(codewords, centroids, inverse_norms):
        from airmoe.kernels.best_columns_triton import plan_cuts

        if plan_cuts(centroids.shape[0], size) is not None:
            pieces = noise_operands(noise)
            return top_m_op(codewords, centroids, size, inverse_norms, *pieces)
    out = torch.empty(codewords.shape[0], size, dtype=torch.int64, device=codewords.device)
    num_experts = centroids.shape[0]
    rows = min(CODEWORDS_PER_TILE, codewords.shape[0])
    # At least a few times the shortlist, or the merging would cost more than the scoring.
    columns = max(CHUNK_ELEMENTS // rows, 4 * size)
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
        out[chunk] = (num_experts - 1 - (best & POSITION)).sort(-1).values
    return out


@operator(
    "airmoe::top_m",
    fake=lambda codewords, _, size, *rest: codewords.new_empty(
        codewords.shape[0], size, dtype=torch.int64
    ),
)
def top_m_op(
    codewords: Tensor,
    centroids: Tensor,
    size: int,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
) -> Tensor:
    """Codewords [G, D] float32, centroids [E, D] of any dtype -> [G, size] ids ascending."""
    from airmoe.kernels.best_columns_triton import find_shortlists

    noise = noise_of(row_keys, noise_std)
    return find_shortlists(codewords, centroids, size, inverse_norms, noise)


@torch.no_grad()
@own_precision
def best_experts(
    hidden: Tensor,
    experts: Tensor,
    count: int,
    noise: Noise | None = None,
    *,
    normalize: bool = False,
    ordered: bool = True,
) -> Tensor:
    """Each token's `count` best experts: hidden [T, D], experts [E, D] -> [T, count] ids.

    With `normalize` logits are <h, w_e> / |w_e|, 0 for a zero row. Best first, or ids ascending
    where not `ordered`, which saves a sort; ties go to the lowest id. Operands may differ in dtype;
    scores are float32 (or wider) whatever they are, and no copy of the experts is made for it.
    """
    if use_triton(hidden, experts):
        from airmoe.kernels.best_columns_triton import plan_cuts

        if plan_cuts(experts.shape[0], count) is not None:
            pieces = noise_operands(noise)
            return best_experts_op(hidden, experts, count, *pieces, normalize, ordered)
    ids = torch.empty(hidden.shape[0], count, dtype=torch.int64, device=hidden.device)
    scales = None
    if normalize:
        scales = torch.cat([inverse_norms(experts[part]) for part in _expert_chunks(experts)])
    step = max(1, CHUNK_ELEMENTS // experts.shape[0])
    for start in range(0, hidden.shape[0], step):
        rows = slice(start, start + step)
        logits = _wide_logits(hidden[rows], experts, scales)
        if noise is not None:
            columns = torch.arange(experts.shape[0], device=hidden.device)
            logits = logits + noise.rows(rows, columns)
        ids[rows] = top_positions(logits, count)
    return ids if ordered else ids.sort(-1).values


def _wide_logits(hidden: Tensor, experts: Tensor, scales: Tensor | None) -> Tensor:
    """[T, E] scaled products in float32 or wider, some experts at a time."""
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    if hidden.dtype == experts.dtype == work:
        logits = hidden @ experts.T
    else:
        hidden = hidden.to(work)
        logits = torch.empty(hidden.shape[0], experts.shape[0], dtype=work, device=hidden.device)
        for part in _expert_chunks(experts):
            logits[:, part] = hidden @ experts[part].to(work).T
    return logits if scales is None else logits * scales


def _expert_chunks(experts: Tensor) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, experts.shape[1]))
    return [slice(start, start + step) for start in range(0, experts.shape[0], step)]


@operator(
    "airmoe::best_experts",
    fake=lambda hidden, _, count, *rest: hidden.new_empty(
        hidden.shape[0], count, dtype=torch.int64
    ),
)
def best_experts_op(
    hidden: Tensor,
    experts: Tensor,
    count: int,
    row_keys: Tensor | None,
    noise_std: float,
    normalize: bool,
    ordered: bool,
) -> Tensor:
    """[T, D] and [E, D] -> [T, count] expert ids, best first or, if not `ordered`, ascending."""
    from airmoe.kernels.best_experts_triton import find_best

    return find_best(hidden, experts, count, noise_of(row_keys, noise_std), normalize, ordered)


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
    step = max(1, CHUNK_ELEMENTS // max(1, hidden.shape[0]))
    for start in range(0, experts.shape[0], step):
        chunk = slice(start, start + step)
        logits = experts[chunk] @ hidden.T - log_z  # [step, T] log-probabilities
        if noise is not None:
            columns = torch.arange(experts.shape[0], device=hidden.device)[chunk]
            logits += noise.pairs(tokens, columns.unsqueeze(-1))
        ids[chunk] = top_positions(logits.masked_fill_(~valid, -torch.inf), count)
    return ids
