"""What an expert has in all its cells, added up by one gather per entry, in a fixed order."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.operators import operator

EXPERTS, LANES = 8, 32


@triton.jit
def _sum_kernel(values, entries, starts, out, num_experts, WIDE: tl.constexpr,
                EXPERTS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    mask = experts < num_experts
    begin = tl.load(starts + experts, mask=mask, other=0)
    end = tl.load(starts + experts + 1, mask=mask, other=0)
    total = tl.zeros((EXPERTS, LANES), WIDE)
    for start in range(0, tl.max(end - begin, axis=0), LANES):
        places = (begin + start)[:, None] + tl.arange(0, LANES)[None, :]
        own = places < end[:, None]
        entry = tl.load(entries + places, mask=own, other=0)
        total += tl.load(values + entry, mask=own, other=0).to(WIDE)
    tl.store(out + experts, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=mask)


@operator("airmoe::sum_by_expert")
def sum_by_expert_op(values: Tensor, entries: Tensor, starts: Tensor) -> Tensor:
    """`ReverseIndex.sum_by_expert`: [G, M] -> [E]."""
    num_experts = starts.shape[0] - 1
    out = torch.empty(num_experts, dtype=values.dtype, device=values.device)
    _sum_kernel[(triton.cdiv(num_experts, EXPERTS),)](
        values.contiguous(), entries, starts, out, num_experts,
        WIDE=tl.float64 if values.is_floating_point() else tl.int64,
        EXPERTS=EXPERTS, LANES=LANES, num_warps=4,
    )  # fmt: skip
    return out


@sum_by_expert_op.register_fake
def _(values: Tensor, entries: Tensor, starts: Tensor) -> Tensor:
    return values.new_empty(starts.shape[0] - 1)
