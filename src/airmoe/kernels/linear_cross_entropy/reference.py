"""A few tokens' logits at a time, with the gradients taken in the same pass.

The gradient of a sum of losses does not depend on what comes after it but for one factor, so it is
computed where the logits are at hand, and backward only multiplies: no second product of T x V.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CPU_CHUNK_BYTES = 256 * 2**20
CUDA_CHUNK_BYTES = 2**30  # products must be large to fill a GPU
BYTES_PER_LOGIT = 10


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
    for chunk in token_chunks(hidden, weight.shape[0]):
        skipped = (labels[chunk] == ignore_index).unsqueeze(-1)  # [n, 1]
        # A token that does not count may hold anything; as 0 it spoils nothing that all share.
        states = hidden[chunk].masked_fill(skipped, 0).to(dtype)
        targets = labels[chunk].unsqueeze(-1).masked_fill(skipped, 0)  # [n, 1]
        log_probs = torch.log_softmax(states @ rows.T, -1, dtype=exact)  # [n, V]
        target_log_probs = log_probs.gather(1, targets)
        losses[chunk] = -target_log_probs.masked_fill(skipped, 0).squeeze(-1)
        if not (needs_hidden or needs_weight):
            continue
        grad_logits = _softmax_minus_one_hot(log_probs, targets, target_log_probs, gradient_dtype)
        if grad_hidden is not None:
            grad_hidden[chunk] = (grad_logits @ gradient_rows).masked_fill_(skipped, 0)
        if grad_weight is not None:
            grad_weight += grad_logits.T @ states.to(gradient_dtype)
    return LossAndGradients(losses.sum(), grad_hidden, grad_weight)


def token_chunks(hidden: Tensor, num_words: int) -> list[slice]:
    """Runs of tokens whose logits fit the budget: two float32 copies, one of lower precision."""
    step = max(1, chunk_bytes(hidden.device) // (BYTES_PER_LOGIT * max(1, num_words)))
    return [slice(start, start + step) for start in range(0, hidden.shape[0], step)]


def chunk_bytes(device: torch.device) -> int:
    """How much memory the logits of a chunk may take."""
    return CPU_CHUNK_BYTES if device.type == "cpu" else CUDA_CHUNK_BYTES


def _softmax_minus_one_hot(
    log_probs: Tensor, targets: Tensor, target_log_probs: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits [n, V] in `dtype`; written over `log_probs` if that is theirs."""
    same = log_probs.dtype == dtype
    grad = torch.exp(log_probs, out=log_probs if same else torch.empty_like(log_probs, dtype=dtype))
    return grad.scatter_(1, targets, (target_log_probs.exp() - 1).to(dtype))


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
        grad_hidden, grad_weight = scaled_gradients(grad, ctx.saved_tensors, ctx.dtypes)
        return grad_hidden, grad_weight, None, None, None


def scaled_gradients(
    grad: Tensor, gradients: Iterable[Tensor | None], dtypes: Iterable[torch.dtype]
) -> list[Tensor | None]:
    """Backward: the gradients, found beside the loss, times what came after it, in `dtypes`."""
    if torch.is_grad_enabled():  # create_graph=True
        # The gradients were saved as constants, so their own derivative would be silently 0.
        raise RuntimeError("linear_cross_entropy has no second derivative: use create_graph=False")
    # Not in place: a graph that is retained comes here again. Multiplied before the cast, so
    # that a loss scale reaches half precision's range with the small gradients it is for.
    return [
        None if saved is None else (saved * grad).to(dtype)
        for saved, dtype in zip(gradients, dtypes, strict=True)
    ]
