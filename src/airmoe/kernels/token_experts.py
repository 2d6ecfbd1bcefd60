"""The weights of experts, and experts over per-token lists (Eq. 1).

Rows are fetched by index: nothing of size T * K * D. PEER and exact top-K run on lists, and every
router when there are too few tokens to fill cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.kernels.backend import Gradient, operator, own_precision, use_triton
from airmoe.kernels.rows import gather_dot, gather_total

SMALL_BATCH = 64  # tokens up to which fetching the chosen beats products over pools

# "geglu_tanh" is Gemma's: GELU by its tanh formula, which differs from GELU by up to 5e-4.
Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "relu", "silu"]
GATED: dict[str, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
PLAIN_BACKWARD: dict[str, Callable[..., Tensor]] = {  # (gradient, input) -> gradient of the input
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
    "relu": partial(torch.ops.aten.threshold_backward, threshold=0),
}


@dataclass(frozen=True)
class ExpertTables:
    """Experts of `size` neurons each; neuron n of expert e is row e * size + n of all tables."""

    gate: Tensor | None  # [E * size, D], for gated activations only
    up: Tensor
    down: Tensor
    activation: str  # one of `Activation`; operators only know plain strings
    size: int = 1

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


def is_gated(activation: str) -> bool:
    """Gated experts have three matrices (gate, up, down), the others two."""
    return activation in GATED


def activate(activation: str, up: Tensor, gate: Tensor | None = None) -> Tensor:
    """act(up), or act(gate) * up for gated experts; elementwise."""
    return PLAIN[activation](up) if gate is None else PLAIN[GATED[activation]](gate) * up


def backward_follows(*tensors: Tensor | None) -> bool:
    """Whether what the backward needs must be kept."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


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
        keep = backward_follows(hidden, gate, up, down, weights)
        form = (tables.activation, tables.size, keep)
        return token_experts_op(hidden, gate, up, down, weights, expert_ids, *form)[0]
    neurons = tables.neurons(expert_ids)  # [T, K * S]
    pre_gate = None if gate is None else gather_dot(hidden, gate, neurons)
    active = activate(tables.activation, gather_dot(hidden, up, neurons), pre_gate)
    weights = weights.to(active.dtype).repeat_interleave(tables.size, dim=-1)
    return gather_total(active * weights, down, neurons)


def empty_pre(
    hidden: Tensor, gate: Tensor | None, shape: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor]:
    """Buffers for the pre-activations of up and gate: empty if not kept, or if there is no gate."""
    return (
        hidden.new_empty(shape if keep else 0),
        hidden.new_empty(shape if keep and gate is not None else 0),
    )


def _empty_results(hidden: Tensor, gate: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *_, expert_ids, _activation, expert_size, keep = rest
    shape = expert_ids.shape[0], expert_ids.shape[1] * expert_size
    return hidden.new_empty(hidden.shape), *empty_pre(hidden, gate, shape, keep)


# The output [T, D], and the pre-activations of up and gate [T, K * S], empty where not kept.
token_experts_op = operator(
    "token_experts(Tensor hidden, Tensor? gate, Tensor up, Tensor down, Tensor weights, "
    "Tensor expert_ids, str activation, SymInt expert_size, bool keep) "
    "-> (Tensor output, Tensor pre_up, Tensor pre_gate)",
    "token_experts_triton",
    fake=_empty_results,
    gradient=Gradient(of=("hidden", "gate", "up", "down", "weights"), saved=("pre_up", "pre_gate")),
)

# gates [T, M], pools [G, M], cell and token of each row [T] -> lists by token [T, count]:
# (expert_ids, weights) of the chosen, that is the positions whose gate is not 0, in the order of
# the pool. Every token has one row: `token_ids` is a permutation. Those with fewer than `count` end
# with expert 0 at weight 0; more than `count` are cut off. On Triton only.
compact_gates = operator(
    "compact_gates(Tensor gates, Tensor pools, Tensor cell_of_row, Tensor token_ids, SymInt count) "
    "-> (Tensor, Tensor)",
    "token_experts_triton",
    fake=lambda gates, pools, _cells, _tokens, count: (
        pools.new_empty(gates.shape[0], count),
        gates.new_empty(gates.shape[0], count),
    ),
)
