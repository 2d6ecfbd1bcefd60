"""Logits of the experts that tokens have chosen, differentiable, with no [T, K, D] tensor."""

from __future__ import annotations

from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.chosen_logits import reference
from airmoe.kernels.precision import own_precision


@own_precision
def chosen_logits(hidden: Tensor, experts: Tensor, ids: Tensor, *, normalize: bool) -> Tensor:
    """<h_t, w_id>, with `normalize` divided by |w_id|: [T, K], float32 or wider.

    hidden [T, D], experts [E, D], ids [T, K]. A zero row gives 0. The gradient goes through the
    norm; gradients are in the dtype of their operand. Operands may differ in dtype.
    """
    if use_triton(hidden, experts, ids):
        from airmoe.kernels.chosen_logits import operator

        return operator.chosen_logits(hidden, experts, ids, normalize)
    return reference.chosen_logits(hidden, experts, ids, normalize)
