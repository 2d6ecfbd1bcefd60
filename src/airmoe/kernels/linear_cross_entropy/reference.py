"""A few tokens' logits at a time, with the gradients taken in the same pass.

The gradient of a sum of losses does not depend on what comes after it but for one factor, so it is
computed where the logits are at hand, and backward only multiplies: no second product of T x V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CPU_CHUNK_BYTES = 256 * 2**20
CUDA_CHUNK_BYTES = 2**30  # products must be large to fill a GPU


@dataclass(frozen=True)
class LossAndGradients:
    loss: Tensor  # scalar, float32 or wider
    hidden: Tensor | None  # [T, D] gradient, where it was asked for
    weight: Tensor | None  # [V, D] gradient, float32 or wider


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    needs_hidden: bool = False,
    needs_weight: bool = False,
) -> LossAndGradients:
    """Summed loss of hidden [T, D] against weight [V, D], products in `dtype`."""
    exact = torch.promote_types(dtype, torch.float32)
    # Unscaled gradients do not fit half precision: a sum over tokens overflows, a small
    # probability vanishes. bfloat16 has the range.
    gradient_dtype = exact if dtype == torch.float16 else dtype
    rows = weight.to(dtype)
    gradient_rows = rows.to(gradient_dtype)  # the same tensor but for half precision
    losses = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)  # [T]
    grad_hidden = torch.empty_like(hidden, dtype=gradient_dtype) if needs_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
    for chunk in token_chunks(hidden, weight):
        states, targets = hidden[chunk].to(dtype), labels[chunk]
        counted = targets != ignore_index  # [n]
        probs, losses[chunk] = _probs_and_losses(states @ rows.T, targets, counted)
        if grad_hidden is None and grad_weight is None:
            continue
        grad_logits = _gradient_of_logits(probs, targets, counted).to(gradient_dtype)  # [n, V]
        if grad_hidden is not None:
            grad_hidden[chunk] = grad_logits @ gradient_rows
        if grad_weight is not None:
            # An uncounted token may hold anything, and 0 x NaN would spoil what all share.
            states = states.masked_fill(~counted.unsqueeze(-1), 0).to(gradient_dtype)
            grad_weight += grad_logits.T @ states
    return LossAndGradients(losses.sum(), grad_hidden, grad_weight)


def token_chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Runs of tokens whose logits, as float32 with a copy of lower precision, fit the budget."""
    budget = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CUDA_CHUNK_BYTES
    step = max(1, budget // (8 * max(1, weight.shape[0])))
    return [slice(start, start + step) for start in range(0, hidden.shape[0], step)]


def _probs_and_losses(logits: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax [n, V] and loss [n], float32 or wider; float32 logits are overwritten."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    peak = logits.amax(-1, keepdim=True)
    target_logits = logits.gather(1, _places(targets, counted))  # [n, 1]
    probs = logits.sub_(peak).exp_()
    total = probs.sum(-1, keepdim=True)
    losses = (total.log() + (peak - target_logits)).squeeze(-1)
    return probs.div_(total), losses.masked_fill(~counted, 0)


def _gradient_of_logits(probs: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """softmax - one-hot, 0 for tokens that do not count; written over `probs`."""
    places = _places(targets, counted)
    probs.scatter_(1, places, probs.gather(1, places) - 1)
    return probs.masked_fill_(~counted.unsqueeze(-1), 0)


def _places(targets: Tensor, counted: Tensor) -> Tensor:
    """Labels [n, 1] that may be used as an index: 0 stands in for the uncounted."""
    return targets.masked_fill(~counted, 0).unsqueeze(-1)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        result = loss_and_gradients(
            hidden, weight, labels, ignore_index, dtype, needs_hidden, needs_weight
        )
        ctx.save_for_backward(result.hidden, result.weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return result.loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():  # create_graph=True
            # The gradients were saved as constants, so their own derivative would be silently 0.
            raise RuntimeError(
                "linear_cross_entropy has no second derivative: use create_graph=False"
            )
        # Not in place: a graph that is retained comes here again. Multiplied before the cast, so
        # that a loss scale reaches half precision's range with the small gradients it is for.
        grad_hidden, grad_weight = (
            None if saved is None else (saved * grad).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return grad_hidden, grad_weight, None, None, None
