"""Each token's best experts among all, or each expert's best tokens: exact, no [T, E] tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.noise import Noise, noise_operands
from airmoe.kernels.norms import inverse_norms
from airmoe.kernels.top_k import top_positions

CHUNK_ELEMENTS = 1 << 22


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
        from airmoe.kernels.best_experts_triton import best_experts_op
        from airmoe.kernels.shortlist_triton import plan_cuts

        if plan_cuts(experts.shape[0], count) is not None:
            pieces = noise_operands(noise)
            return best_experts_op(hidden, experts, count, *pieces, normalize, ordered)
    ids = torch.empty(hidden.shape[0], count, dtype=torch.int64, device=hidden.device)
    scales = (
        torch.cat([inverse_norms(experts[part]) for part in _expert_chunks(experts)])
        if normalize
        else None
    )
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
