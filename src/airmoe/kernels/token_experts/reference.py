"""Experts over per-token lists as products over lists of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.cell_experts.activations import Activation, activate
from airmoe.kernels.rows import gather_dot, gather_total


def token_experts(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    activation: Activation,
    expert_size: int,
) -> Tensor:
    """sum_k weights[t, k] * act(<hidden[t], up[id]>) * down[id], over all neurons of an expert."""
    neurons = neuron_rows(expert_ids, expert_size)  # [T, K * S]
    pre_gate = None if gate is None else gather_dot(hidden, gate, neurons)
    active = activate(activation, gather_dot(hidden, up, neurons), pre_gate)
    weights = weights.to(active.dtype).repeat_interleave(expert_size, dim=-1)
    return gather_total(active * weights, down, neurons)


def neuron_rows(expert_ids: Tensor, expert_size: int) -> Tensor:
    """[T, K] expert ids -> [T, K * S] rows of their neurons."""
    if expert_size == 1:
        return expert_ids
    neurons = torch.arange(expert_size, device=expert_ids.device)
    return (expert_ids.unsqueeze(-1) * expert_size + neurons).flatten(1)
