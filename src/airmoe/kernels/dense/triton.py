"""Each token's best experts among all, streamed by the kernels of `shortlist.triton`.

Rows are tokens, columns are experts. From one token to a few dozen the time is that of reading the
experts once; with many it is that of the product, made of bfloat16 parts as exact as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.assign.triton import bfloat16_parts
from airmoe.kernels.noise import Noise
from airmoe.kernels.shortlist.triton import (
    BestColumns,
    Tables,
    exact_as_bfloat16,
    plan_cuts,
    whole,
)

SPLIT_TOKENS = 256  # from so many tokens on a copy of the experts in parts pays
SPLIT_ELEMENTS = 1 << 27  # the largest table of experts that is copied so: 768 MiB
SORT_ELEMENTS = 1 << 22  # scores sorted at a time


def _parts(table: Tensor) -> Tensor:
    return whole(table) if exact_as_bfloat16(table) else bfloat16_parts(table)


def _tables(hidden: Tensor, experts: Tensor, noise: Noise | None) -> Tables:
    copies = hidden.shape[0] >= SPLIT_TOKENS and experts.numel() <= SPLIT_ELEMENTS
    if exact_as_bfloat16(experts) or copies:
        return Tables(_parts(hidden), _parts(experts), None, noise, float32=False)
    return Tables(whole(hidden), whole(experts), None, noise, float32=True)


@torch.library.custom_op("airmoe::best_experts", mutates_args=())
def best_experts_op(
    hidden: Tensor, experts: Tensor, count: int, row_keys: Tensor | None, noise_std: float
) -> Tensor:
    """`reference.best_experts`: hidden [T, D], experts [E, D] -> [T, count] ids, best first."""
    num_tokens, device = hidden.shape[0], hidden.device
    best_ids = torch.empty(num_tokens, count, dtype=torch.int64, device=device)
    if num_tokens == 0:
        return best_ids
    cuts = plan_cuts(experts.shape[0], count)
    assert cuts is not None, "the caller checks that lists are short enough"
    noise = None if row_keys is None else Noise(row_keys, noise_std)
    best = BestColumns(_tables(hidden, experts, noise), count, cuts)
    ids = torch.empty(num_tokens, count, dtype=torch.int32, device=device)
    scores = torch.empty(num_tokens, count, dtype=torch.float32, device=device)
    for rows in best.chunks():
        best.find(rows, ids[rows], scores[rows])
    step = max(1, SORT_ELEMENTS // count)
    for start in range(0, num_tokens, step):
        rows = slice(start, start + step)
        # Ids ascend, so a stable sort leaves ties in their order.
        order = scores[rows].sort(dim=-1, descending=True, stable=True).indices
        best_ids[rows] = ids[rows].gather(-1, order)
    return best_ids


@best_experts_op.register_fake
def _(
    hidden: Tensor, experts: Tensor, count: int, row_keys: Tensor | None, noise_std: float
) -> Tensor:
    return hidden.new_empty(hidden.shape[0], count, dtype=torch.int64)
