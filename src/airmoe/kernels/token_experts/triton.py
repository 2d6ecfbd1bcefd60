"""What token experts need beside the products over lists of rows, in Triton.

Between the products, one elementwise kernel each way; and the lists themselves, for routers that
choose by cells, when there are too few tokens to fill cells.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_experts.activations import is_gated
from airmoe.kernels.cell_experts.activations_triton import (
    ACTIVATION_CODES,
    activate,
    activation_grads,
)

ELEMENTS_BLOCK = 1024  # of the elementwise kernels
COMPACT_BLOCK = 2048  # pool positions looked at together
NUM_WARPS = 4


@triton.jit
def _weigh_kernel(
    up, gate, weights, weighted, size,
    SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    up_values = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    gate_values = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(weights + places // SIZE, mask=mask, other=0.0).to(tl.float32)
    exact: tl.constexpr = up.dtype.element_ty == tl.float32
    values = activate(up_values, gate_values, ACTIVATION, exact) * factors
    tl.store(weighted + places, values.to(weighted.dtype.element_ty), mask=mask)


def weigh(up: Tensor, gate: Tensor, weights: Tensor, activation: str, size: int) -> Tensor:
    """Activated values times their expert's weight: [T, K * S] in the dtype of `up`.

    Pass `up` again as `gate` where there is none.
    """
    weighted = torch.empty_like(up)
    _weigh_kernel[(triton.cdiv(up.numel(), ELEMENTS_BLOCK),)](
        up, gate, weights, weighted, up.numel(),
        SIZE=size, ACTIVATION=ACTIVATION_CODES[activation], BLOCK=ELEMENTS_BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return weighted


@triton.jit
def _weigh_grads_kernel(
    grad_weighted, up, gate, weights, grad_up, grad_gate, grad_weights, size,
    SIZE: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    grad = tl.load(grad_weighted + places, mask=mask, other=0.0)
    up_values = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    gate_values = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(weights + places // SIZE, mask=mask, other=0.0).to(tl.float32)
    exact: tl.constexpr = up.dtype.element_ty == tl.float32
    active, grad_up_values, grad_gate_values = activation_grads(
        up_values, gate_values, grad * factors, ACTIVATION, exact
    )
    tl.store(grad_up + places, grad_up_values.to(grad_up.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(grad_gate + places, grad_gate_values.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_weights + places, (grad * active).to(grad_weights.dtype.element_ty), mask=mask)


def weigh_grads(
    grad: Tensor, up: Tensor, gate: Tensor, weights: Tensor, activation: str, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the pre-activations (up, gate) [T, K * S] and of the weights [T, K].

    That of gate is meaningless where there is none.
    """
    gated = is_gated(activation)
    grad_up = torch.empty_like(up)
    grad_gate = torch.empty_like(up) if gated else grad_up
    wide = torch.float32 if size > 1 else weights.dtype
    products = torch.empty(up.shape, dtype=wide, device=up.device)
    _weigh_grads_kernel[(triton.cdiv(up.numel(), ELEMENTS_BLOCK),)](
        grad, up, gate, weights, grad_up, grad_gate, products, up.numel(),
        SIZE=size, ACTIVATION=ACTIVATION_CODES[activation], GATED=gated,
        BLOCK=ELEMENTS_BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    if size > 1:
        products = products.view(*weights.shape, size).sum(-1).to(weights.dtype)
    return grad_up, grad_gate, products


@triton.jit
def _compact_kernel(
    gates, pools, cells, token_ids, expert_ids, weights,
    POOL: tl.constexpr, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cell = tl.load(cells + row).to(tl.int64)
    own = tl.load(token_ids + row).to(tl.int64) * COUNT
    taken = 0
    for start in range(0, POOL, BLOCK_M):
        places = start + tl.arange(0, BLOCK_M)
        inside = places < POOL
        values = tl.load(gates + row * POOL + places, mask=inside, other=0.0)
        ids = tl.load(pools + cell * POOL + places, mask=inside, other=0)
        chosen = values != 0.0  # and not > 0, so that NaN stays visible
        slots = taken + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        mask = chosen & (slots < COUNT)
        tl.store(expert_ids + own + slots, ids, mask=mask)
        tl.store(weights + own + slots, values, mask=mask)
        taken += tl.sum(chosen.to(tl.int32), axis=0)
    for start in range(0, COUNT, BLOCK_C):
        slots = start + tl.arange(0, BLOCK_C)
        mask = (slots >= taken) & (slots < COUNT)
        tl.store(expert_ids + own + slots, 0, mask=mask)
        tl.store(weights + own + slots, 0.0, mask=mask)


def compact_gates(
    gates: Tensor, pools: Tensor, cell_of_row: Tensor, token_ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """gates [T, M], pools [G, M], cell and token of each row [T] -> lists by token [T, count].

    (expert_ids, weights) of the chosen, that is the positions whose gate is not 0, in the order of
    the pool. Every token has one row: `token_ids` is a permutation. Those with fewer than `count`
    end with expert 0 at weight 0; more than `count` are cut off.
    """
    (num_rows, pool), device = gates.shape, gates.device
    expert_ids = torch.empty(num_rows, count, dtype=pools.dtype, device=device)
    weights = torch.empty(num_rows, count, dtype=gates.dtype, device=device)
    if expert_ids.numel() == 0:
        return expert_ids, weights
    _compact_kernel[(num_rows,)](
        gates.contiguous(), pools.contiguous(), cell_of_row, token_ids, expert_ids, weights,
        POOL=pool, COUNT=count, BLOCK_M=min(triton.next_power_of_2(pool), COMPACT_BLOCK),
        BLOCK_C=min(triton.next_power_of_2(count), COMPACT_BLOCK), num_warps=NUM_WARPS,
    )  # fmt: skip
    return expert_ids, weights
