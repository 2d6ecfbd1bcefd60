"""What losses need of the softmax over all experts, without a [T, E] tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import Gradient, chunks, operator, own_precision, use_triton
from airmoe.kernels.noise import Noise, noise_operands
from airmoe.kernels.norms import unit_rows

CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Summary:
    """What losses need of the full softmax."""

    log_z: Tensor  # [T]
    mean_probs: Tensor  # [E]


@own_precision
def softmax_summary(
    hidden: Tensor,
    experts: Tensor,
    token_weights: Tensor,
    noise: Noise | None = None,
    *,
    normalize: bool = False,
) -> Summary:
    """log Z per token and the weighted mean of the softmax over experts, differentiable.

    hidden [T, D], experts [E, D]; token_weights [T] sum to 1 over the tokens that count. Others
    have 0, and may even be NaN, which affects their own log Z only. With `normalize` logits are
    <h, w_e> / |w_e|, 0 for a zero row, and the gradient goes through the norm. Operands may differ
    in dtype; results are float32 or wider, gradients in the dtype of their operand.
    """
    if use_triton(hidden, experts):
        pieces = noise_operands(noise)
        return Summary(*softmax_summary_op(hidden, experts, token_weights, *pieces, normalize))
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    rows = unit_rows(experts) if normalize else experts
    operands = hidden.to(work), rows.to(work), token_weights.to(work)
    return Summary(*_SoftmaxSummary.apply(*operands, noise))


class _SoftmaxSummary(torch.autograd.Function):
    """(log of the softmax denominator [T], mean probability [E]) over all experts."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, experts: Tensor, token_weights: Tensor, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        log_z = torch.empty(hidden.shape[0], dtype=hidden.dtype, device=hidden.device)
        # Sums over chunks in double: chunking must not cost accuracy.
        mean_probs = torch.zeros(experts.shape[0], dtype=torch.float64, device=hidden.device)
        for rows in _token_chunks(hidden, experts):
            logits = _token_logits(hidden, experts, noise, rows)
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
        for rows in _token_chunks(hidden, experts):
            logits = _token_logits(hidden, experts, ctx.noise, rows)
            probs = logits.sub_(log_z[rows].unsqueeze(-1)).exp_()  # [rows, E]
            weight = token_weights[rows]
            inner = grad_log_z[rows] - weight * (probs @ grad_mean)
            grad_logits = probs * (inner.unsqueeze(-1) + weight.unsqueeze(-1) * grad_mean)
            grad_hidden[rows] = grad_logits @ experts
            grad_experts += grad_logits.T @ hidden[rows]
        return grad_hidden, grad_experts, None, None


def _token_logits(hidden: Tensor, experts: Tensor, noise: Noise | None, rows: slice) -> Tensor:
    """[rows, E] logits of some tokens against all experts."""
    logits = hidden[rows] @ experts.T
    if noise is not None:
        columns = torch.arange(experts.shape[0], device=hidden.device)
        logits = logits + noise.rows(rows, columns)
    return logits


def _token_chunks(hidden: Tensor, experts: Tensor) -> Iterator[slice]:
    return chunks(hidden.shape[0], max(1, CHUNK_ELEMENTS // experts.shape[0]))


softmax_summary_op = operator(
    "softmax_summary(Tensor hidden, Tensor experts, Tensor weights, Tensor? row_keys, "
    "float noise_std, bool normalize) -> (Tensor log_z, Tensor mean_probs)",
    "softmax_summary_triton",
    fake=lambda hidden, experts, *_: (
        hidden.new_empty(hidden.shape[0], dtype=torch.float32),
        hidden.new_empty(experts.shape[0], dtype=torch.float32),
    ),
    gradient=Gradient(of=("hidden", "experts"), saved=("log_z",)),
)
