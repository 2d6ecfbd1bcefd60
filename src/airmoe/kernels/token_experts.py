"""Experts over per-token lists (Eq. 1): rows fetched by index, nothing of size T * K * D.

What PEER and exact top-K run on, and every router when there are too few tokens to fill cells.
"""

from __future__ import annotations

from torch import Tensor

from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.expert_tables import ExpertTables, activate, backward_follows
from airmoe.kernels.rows import gather_dot, gather_total

SMALL_BATCH = 64  # tokens up to which fetching the chosen beats products over pools


@own_precision
def token_experts(
    hidden: Tensor, tables: ExpertTables, weights: Tensor, expert_ids: Tensor
) -> Tensor:
    """Sum over each token's list of its weighted experts: [T, D] in the dtype of `hidden`.

    hidden [T, D] and the tables in one dtype; weights, expert_ids [T, K]. An expert that a token
    lists twice counts twice; weight 0 marks an unused slot, which adds nothing.
    """
    gate, up, down = tables.gate, tables.up, tables.down
    if use_triton(hidden, gate, up, down, weights, expert_ids):
        from airmoe.kernels.token_experts_triton import token_experts_op

        keep = backward_follows(hidden, gate, up, down, weights)
        form = (tables.activation, tables.size, keep)
        return token_experts_op(hidden, gate, up, down, weights, expert_ids, *form)[0]
    neurons = tables.neurons(expert_ids)  # [T, K * S]
    pre_gate = None if gate is None else gather_dot(hidden, gate, neurons)
    active = activate(tables.activation, gather_dot(hidden, up, neurons), pre_gate)
    weights = weights.to(active.dtype).repeat_interleave(tables.size, dim=-1)
    return gather_total(active * weights, down, neurons)
