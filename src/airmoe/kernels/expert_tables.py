"""The weights of experts, and what an expert does between its two projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# "geglu_tanh" is Gemma's: GELU by its tanh formula, which differs from GELU by up to 5e-4.
Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "relu", "silu"]
GATED: dict[str, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class ExpertTables:
    """Experts of `size` neurons each; neuron n of expert e is row e * size + n of all tables."""

    gate: Tensor | None  # [E * size, D], for gated activations only
    up: Tensor
    down: Tensor
    activation: Activation
    size: int = 1

    @classmethod
    def of(
        cls, gate: Tensor | None, up: Tensor, down: Tensor, activation: str, size: int
    ) -> ExpertTables:
        """From the arguments of an operator, whose names are plain strings."""
        return cls(gate, up, down, cast(Activation, activation), size)

    def contiguous(self) -> ExpertTables:
        gate = None if self.gate is None else self.gate.contiguous()
        up, down = self.up.contiguous(), self.down.contiguous()
        return ExpertTables(gate, up, down, self.activation, self.size)

    def neurons(self, expert_ids: Tensor) -> Tensor:
        """[n, K] expert ids -> [n, K * size] rows of their neurons."""
        if self.size == 1:
            return expert_ids
        neurons = torch.arange(self.size, device=expert_ids.device)
        return (expert_ids.unsqueeze(-1) * self.size + neurons).flatten(1)


def is_gated(activation: Activation) -> bool:
    """Gated experts have three matrices (gate, up, down), the others two."""
    return activation in GATED


def activate(activation: Activation, up: Tensor, gate: Tensor | None) -> Tensor:
    """act(up), or act(gate) * up for gated experts; elementwise."""
    if gate is not None:
        return _plain(GATED[activation], gate) * up
    return _plain(activation, up)


def _plain(name: str, values: Tensor) -> Tensor:
    if name == "gelu":
        return F.gelu(values)
    if name == "gelu_tanh":
        return F.gelu(values, approximate="tanh")
    if name == "silu":
        return F.silu(values)
    return F.relu(values)


def backward_follows(*tensors: Tensor | None) -> bool:
    """Whether what the backward needs must be kept."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
