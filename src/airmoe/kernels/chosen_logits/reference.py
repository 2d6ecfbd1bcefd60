"""The rows projected onto the unit sphere, then multiplied with the tokens that chose them."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.inverse_norms.reference import unit_rows
from airmoe.kernels.rows import gather_dot


def chosen_logits(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """hidden [T, D], experts [E, D], ids [T, K] -> [T, K] in float32 or wider."""
    work = torch.promote_types(torch.promote_types(hidden.dtype, experts.dtype), torch.float32)
    rows = unit_rows(experts) if normalize else experts
    return gather_dot(hidden.to(work), rows.to(work), ids)
