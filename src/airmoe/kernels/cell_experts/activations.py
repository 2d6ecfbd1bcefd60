"""What an expert does between its two projections."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

# "geglu_tanh" is Gemma's: GELU by its tanh formula, which differs from GELU by up to 5e-4.
Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "relu", "silu"]
GATED: dict[str, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


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
