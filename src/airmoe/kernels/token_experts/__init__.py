"""Experts over per-token lists (Eq. 1): rows fetched by index, nothing of size T * K * D.

What PEER and exact top-K run on, and every router when there are too few tokens to fill cells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.cell_experts.activations import Activation
from airmoe.kernels.precision import own_precision
from airmoe.kernels.token_experts import reference

SMALL_BATCH = 64  # tokens up to which fetching the chosen beats products over pools


@own_precision
def token_experts(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    activation: Activation,
    expert_size: int = 1,
) -> Tensor:
    """Sum over each token's list of its weighted experts: [T, D] in the dtype of `hidden`.

    hidden [T, D]; gate, up, down [E * expert_size, D] (gate only for gated activations), all in one
    dtype; weights, expert_ids [T, K]. An expert that a token lists twice counts twice; weight 0
    marks an unused slot, which adds nothing.
    """
    if use_triton(hidden, gate, up, down, weights, expert_ids):
        from airmoe.kernels.token_experts import operator

        tensors = (hidden, gate, up, down, weights)
        keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        output, _, _ = operator.token_experts(
            hidden, gate, up, down, weights, expert_ids, activation, expert_size, keep
        )
        return output
    return reference.token_experts(
        hidden, gate, up, down, weights, expert_ids, activation, expert_size
    )
