"""`airmoe::nearest_codeword`: the Triton path as an operator that compilers can take in."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.assign.small_batch_triton import nearest_of_few
from airmoe.kernels.assign.triton import nearest_of_many
from airmoe.kernels.operators import operator
from airmoe.kernels.token_experts import SMALL_BATCH


@operator("airmoe::nearest_codeword")
def nearest_codeword(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    """hidden [T, D], codewords [G, D] float32 -> [T] int64, ties to the lowest id."""
    num_tokens = hidden.shape[0]
    if num_tokens == 0:
        return torch.empty(0, dtype=torch.int64, device=hidden.device)
    nearest = nearest_of_few if num_tokens <= SMALL_BATCH else nearest_of_many
    return nearest(hidden, codewords, euclidean)


@nearest_codeword.register_fake
def _(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=torch.int64)
