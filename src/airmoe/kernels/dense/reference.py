"""Scoring every token against every expert, a few tokens (or experts) at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.inverse_norms.reference import inverse_norms, unit_rows
from airmoe.kernels.noise import Noise
from airmoe.kernels.precision import own_precision
from airmoe.kernels.select.reference import top_positions

CHUNK_ELEMENTS = 1 << 22


def token_logits(hidden: Tensor, experts: Tensor, noise: Noise | None, rows: slice) -> Tensor:
    """[rows, E] logits of some tokens against all experts."""
    logits = hidden[rows] @ experts.T
    if noise is not None:
        columns = torch.arange(experts.shape[0], device=hidden.device)
        logits = logits + noise.rows(rows, columns)
    return logits


def token_chunks(hidden: Tensor, experts: Tensor) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // experts.shape[0])
    return [slice(start, start + step) for start in range(0, hidden.shape[0], step)]


def best_experts(
    hidden: Tensor, experts: Tensor, count: int, noise: Noise | None, normalize: bool
) -> Tensor:
    """[T, count] ids of each token's best experts, best first."""
    ids = torch.empty(hidden.shape[0], count, dtype=torch.int64, device=hidden.device)
    scales = (
        torch.cat([inverse_norms(experts[part]) for part in expert_chunks(experts)])
        if normalize
        else None
    )
    for rows in token_chunks(hidden, experts):
        logits = wide_logits(hidden[rows], experts, scales)
        if noise is not None:
            columns = torch.arange(experts.shape[0], device=hidden.device)
            logits = logits + noise.rows(rows, columns)
        ids[rows] = top_positions(logits, count)
    return ids


def wide_logits(hidden: Tensor, experts: Tensor, scales: Tensor | None) -> Tensor:
    """[T, E] scaled products in float32 or wider, some experts at a time."""
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    if hidden.dtype == experts.dtype == work:
        logits = hidden @ experts.T
    else:
        hidden = hidden.to(work)
        logits = torch.empty(hidden.shape[0], experts.shape[0], dtype=work, device=hidden.device)
        for part in expert_chunks(experts):
            logits[:, part] = hidden @ experts[part].to(work).T
    return logits if scales is None else logits * scales


def expert_chunks(experts: Tensor) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, experts.shape[1]))
    return [slice(start, start + step) for start in range(0, experts.shape[0], step)]


def best_tokens(
    hidden: Tensor, experts: Tensor, log_z: Tensor, valid: Tensor, count: int, noise: Noise | None
) -> Tensor:
    """[E, count] ids of each expert's best tokens by probability, best first, valid ones first."""
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


def softmax_summary(
    hidden: Tensor, experts: Tensor, token_weights: Tensor, noise: Noise | None, normalize: bool
) -> tuple[Tensor, Tensor]:
    """log Z [T] and mean probabilities [E], in float32 or wider."""
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    rows = unit_rows(experts) if normalize else experts
    return SoftmaxSummary.apply(hidden.to(work), rows.to(work), token_weights.to(work), noise)


class SoftmaxSummary(torch.autograd.Function):
    """(log of the softmax denominator [T], mean probability [E]) over all experts."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, experts: Tensor, token_weights: Tensor, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        log_z = torch.empty(hidden.shape[0], dtype=hidden.dtype, device=hidden.device)
        # Sums over chunks in double: chunking must not cost accuracy.
        mean_probs = torch.zeros(experts.shape[0], dtype=torch.float64, device=hidden.device)
        for rows in token_chunks(hidden, experts):
            logits = token_logits(hidden, experts, noise, rows)
            log_z[rows] = logits.logsumexp(-1)
            probs = (logits - log_z[rows].unsqueeze(-1)).exp_()
            weight = token_weights[rows].unsqueeze(-1)
            # What does not count may hold anything, and 0 * NaN is NaN.
            mean_probs += probs.mul_(weight).masked_fill_(weight == 0, 0).sum(0)
        ctx.noise = noise
        ctx.save_for_backward(hidden, experts, token_weights, log_z)
        return log_z, mean_probs.to(hidden.dtype)

    @staticmethod
    @once_differentiable
    @own_precision
    def backward(
        ctx: Any, grad_log_z: Tensor, grad_mean: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        hidden, experts, token_weights, log_z = ctx.saved_tensors
        idle = (token_weights == 0) & (grad_log_z == 0)
        hidden, log_z = hidden.masked_fill(idle.unsqueeze(-1), 0), log_z.masked_fill(idle, 0)
        grad_hidden, grad_experts = torch.empty_like(hidden), torch.zeros_like(experts)
        for rows in token_chunks(hidden, experts):
            logits = token_logits(hidden, experts, ctx.noise, rows)
            probs = logits.sub_(log_z[rows].unsqueeze(-1)).exp_()  # [rows, E]
            weight = token_weights[rows]
            inner = grad_log_z[rows] - weight * (probs @ grad_mean)
            grad_logits = probs * (inner.unsqueeze(-1) + weight.unsqueeze(-1) * grad_mean)
            grad_hidden[rows] = grad_logits @ experts
            grad_experts += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_experts, None, None
