"""Choosing the K best and weighing them (Alg. 1, line 10)."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.select import reference
from airmoe.kernels.select.reference import top_positions


def top_k_gates(scores: Tensor, valid: Tensor, count: int) -> Tensor:
    """scores [R, n] -> gates [R, n]: softmax over each row's `count` best, 0 elsewhere.

    Rows that are not `valid` [R] get no gate at all. In the others exactly `count` are positive,
    ties go to the lowest position, and selection is on float32. With `count` = 1 the weight is
    the probability among all n (Switch), so that it has a gradient.
    """
    if use_triton(scores):
        from airmoe.kernels.select.triton import top_k_gates_op

        return top_k_gates_op(scores, valid, count)
    return reference.top_k_gates(scores, valid, count)


def softmax_weights(logits: Tensor) -> Tensor:
    """Softmax over chosen logits [..., K]; never 0, because 0 marks an unused slot."""
    return logits.softmax(-1).clamp_min(torch.finfo(torch.float32).tiny)


__all__ = ["softmax_weights", "top_k_gates", "top_positions"]
