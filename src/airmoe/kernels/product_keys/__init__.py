"""PEER's search: the best pairs of two scored halves, without scoring all pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.product_keys import reference


@torch.no_grad()
def best_pairs(first: Tensor, second: Tensor, count: int) -> Tensor:
    """Expert ids i * side + j of the `count` largest a_i + b_j: [T, P, count] int64, best first.

    first, second [T, P, side] hold a and b. Selection is on the float32 sums, and ties go to the
    lowest id. The one exception are sums that only rounding made equal: a pair whose halves are
    both no better than those of `count` other pairs is not chosen, even if its id is lower.
    """
    if first.dtype == torch.float32 and use_triton(first, second):
        from airmoe.kernels.product_keys.triton import best_pairs_op, in_registers

        if in_registers(first.shape[-1], count):
            return best_pairs_op(first, second, count)
    return reference.best_pairs(first, second, count)
