"""Logits of the experts that tokens have chosen, differentiable, with no [T, K, D] tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import own_precision, use_triton
from airmoe.kernels.norms import unit_rows
from airmoe.kernels.rows import gather_dot


@own_precision
def chosen_logits(hidden: Tensor, experts: Tensor, ids: Tensor, *, normalize: bool) -> Tensor:
    """<h_t, w_id>, with `normalize` divided by |w_id|: [T, K], float32 or wider.

    hidden [T, D], experts [E, D], ids [T, K]. A zero row gives 0. The gradient goes through the
    norm; gradients are in the dtype of their operand. Operands may differ in dtype.
    """
    if use_triton(hidden, experts, ids):
        from airmoe.kernels.chosen_logits_triton import chosen_logits_op

        return chosen_logits_op(hidden, experts, ids, normalize)
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    rows = unit_rows(experts) if normalize else experts
    return gather_dot(hidden.to(work), rows.to(work), ids)
