"""Exact scoring over all experts without a [T, E] tensor: what AIR is measured against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.dense import reference
from airmoe.kernels.noise import Noise
from airmoe.kernels.precision import own_precision


@dataclass(frozen=True)
class Summary:
    """What losses need of the full softmax."""

    log_z: Tensor  # [T]
    mean_probs: Tensor  # [E]


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
        from airmoe.kernels.dense.triton import best_experts_op
        from airmoe.kernels.shortlist.triton import plan_cuts

        if plan_cuts(experts.shape[0], count) is not None:
            keys, std = (None, 0.0) if noise is None else (noise.row_keys, noise.std)
            return best_experts_op(hidden, experts, count, keys, std, normalize, ordered)
    ids = reference.best_experts(hidden, experts, count, noise, normalize)
    return ids if ordered else ids.sort(-1).values


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
    """Each expert's `count` best valid tokens by softmax probability: -> [E, count] ids."""
    return reference.best_tokens(hidden, experts, log_z, valid, count, noise)


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

    hidden [T, D], experts [E, D]; token_weights [T] sum to 1 over the tokens that count (0 for the
    others, which may hold anything: they spoil no more than their own log Z). With `normalize`
    logits are <h, w_e> / |w_e|, 0 for a zero row, and the gradient goes through the norm. Operands
    may differ in dtype; results are float32 or wider, gradients in the dtype of their operand.
    """
    if use_triton(hidden, experts):
        from airmoe.kernels.dense import operator

        keys, std = (None, 0.0) if noise is None else (noise.row_keys, noise.std)
        found = operator.softmax_summary(hidden, experts, token_weights, keys, std, normalize)
    else:
        found = reference.softmax_summary(hidden, experts, token_weights, noise, normalize)
    return Summary(*found)
