"""Experts over cells (Eq. 1): per cell a few dense products, no per-token gather."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.cell_experts import reference
from airmoe.kernels.cell_experts.activations import Activation, activate, is_gated
from airmoe.kernels.cells import Cells
from airmoe.kernels.precision import own_precision


@own_precision
def cell_experts(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gates: Tensor,
    cells: Cells,
    *,
    activation: Activation,
    expert_size: int = 1,
    counts: Tensor | None = None,
) -> Tensor:
    """Sum over each token's rows of its gated experts: [T, D] in the dtype of `hidden`.

    hidden [T, D]; gate, up, down [E * expert_size, D] (gate only for gated activations);
    gates [N, M]. Experts with gate 0 add nothing but are computed: the price of dense products.
    With `counts` [G, M], how many rows of a cell have a gate for each of its experts, Triton's
    backward passes over those without.
    """
    tensors = (hidden, gate, up, down, gates)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if use_triton(hidden, gate, up, down):
        from airmoe.kernels.cell_experts.operator import run

        return run(
            hidden, gate, up, down, gates, cells,
            activation=activation, expert_size=expert_size, keep=keep, counts=counts,
        )  # fmt: skip
    form = reference.Form(activation, expert_size, hidden.dtype, keep)
    return reference.CellExperts.apply(  # type: ignore[no-any-return]
        hidden, gate, up, down, gates, cells.token_ids, cells.offsets, cells.pools, form
    )


__all__ = ["Activation", "activate", "cell_experts", "is_gated"]
