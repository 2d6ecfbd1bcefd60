"""Choosing the K best and weighing them (Alg. 1, line 10): exact, ties to the lowest position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from airmoe.kernels.backend import chunks, operator, use_triton, without_autograd

POSITION = 0xFFFFFFFF  # the low half of a key: how many columns come after its own
LONGEST_ROW = 16384  # scores that fit into the registers of one Triton program
LONGEST_LIST = 12288  # best scores that Triton selects of a longer row
CPU_CHUNK_ELEMENTS = 1 << 18  # keeps the int64 keys of one chunk inside the cache
CUDA_CHUNK_ELEMENTS = 1 << 22


def selection_keys(scores: Tensor, places: Tensor | None = None, width: int = 0) -> Tensor:
    """Distinct int64 keys in the order (score descending, position ascending).

    The float32 bits become an order-preserving integer in the high half, the reversed position
    the low half, so any top-K of the keys picks exactly K and breaks ties the same way. With
    `places`, scores are those of some columns only, at these places in a row of `width`.
    """
    if places is None:
        width = scores.shape[-1]
        places = torch.arange(width, device=scores.device)
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 makes -0 and 0 a tie
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (width - 1 - places)


def top_positions(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest along the last dimension, best first."""
    keys = selection_keys(scores).topk(count, dim=-1).values
    return scores.shape[-1] - 1 - (keys & POSITION)


def softmax_weights(logits: Tensor) -> Tensor:
    """Softmax over chosen logits [..., K]; never 0, because 0 marks an unused slot."""
    return logits.softmax(-1).clamp_min(torch.finfo(torch.float32).tiny)


def top_k_gates(scores: Tensor, valid: Tensor, count: int) -> Tensor:
    """scores [R, n] -> gates [R, n]: softmax over each row's `count` best, 0 elsewhere.

    Rows that are not `valid` [R] get no gate at all. In the others exactly `count` are positive,
    ties go to the lowest position, and selection is on float32. With `count` = 1 the weight is
    the probability among all n (Switch), so that it has a gradient.
    """
    if scores.shape[1] <= LONGEST_ROW and use_triton(scores):
        return top_k_gates_op(scores, valid, count)
    if not torch.is_grad_enabled():
        return without_autograd(_TopKGates, scores, valid, count)
    return _TopKGates.apply(scores, valid, count)  # type: ignore[no-any-return]


class _TopKGates(torch.autograd.Function):
    """Masked softmax over the chosen entries (or, for K = 1, over all of them)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, valid: Tensor, count: int) -> Tensor:
        gates = torch.zeros_like(scores)
        looks = scores.device.type == "cpu" and not torch.compiler.is_compiling()  # without waiting
        elements = CPU_CHUNK_ELEMENTS if looks else CUDA_CHUNK_ELEMENTS
        step = max(1, elements // max(1, scores.shape[1]))
        for rows in chunks(scores.shape[0], step):
            part = scores[rows]
            ranked = part.float() if looks else selection_keys(part)
            best = ranked.topk(count, sorted=False)
            if looks:
                mask = ranked >= best.values.amin(-1, keepdim=True)
                if not (mask.sum(-1) == count).all():  # equal scores, or NaN: keys decide
                    best = selection_keys(part).topk(count, sorted=False)
            if count == 1:
                log_probs = part.log_softmax(-1).gather(1, best.indices)
            else:
                log_probs = part.gather(1, best.indices).log_softmax(-1)
            # A chosen gate never underflows to 0, because 0 means "not chosen".
            chosen = log_probs.exp_().clamp_min_(torch.finfo(torch.float32).tiny)
            chosen.masked_fill_(~valid[rows].unsqueeze(-1), 0.0)
            gates[rows].scatter_(1, best.indices, chosen)
        ctx.save_for_backward(gates, scores if count == 1 else None)
        return gates

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_gates: Tensor) -> tuple[Tensor, None, None]:
        gates, scores = ctx.saved_tensors
        weighted = grad_gates * gates
        total = weighted.sum(-1, keepdim=True)
        probs = gates if scores is None else scores.softmax(-1)
        return weighted.addcmul_(probs, total, value=-1), None, None


top_k_gates_op = operator(
    "top_k_gates(Tensor scores, Tensor valid, SymInt count) -> Tensor",
    "top_k_triton",
    fake=lambda scores, *_: torch.empty_like(scores, memory_format=torch.contiguous_format),
)
top_k_gates_backward_op = operator(
    "top_k_gates_backward(Tensor grad_gates, Tensor gates, Tensor? scores) -> Tensor",
    "top_k_triton",
    fake=lambda grads, gates, _: torch.empty_like(gates),
)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    """Without the scores where the gradient needs only the gates: `Gradient` would keep them."""
    scores, _, count = inputs
    ctx.save_for_backward(output, scores if count == 1 else None)


def _backward(ctx: Any, grad_gates: Tensor) -> tuple[Tensor, None, None]:
    gates, scores = ctx.saved_tensors
    scores = None if scores is None else scores.contiguous()
    return top_k_gates_backward_op(grad_gates, gates, scores), None, None


top_k_gates_op.register_autograd(_backward, setup_context=_save)
