"""Experts over per-token lists, and such lists for routers that choose by cells, in Triton.

Large batches run the products of `rows_triton`, one matrix or two at a time, so that little more
than one table competes for the cache, with one elementwise kernel each way between them. For a few
tokens (decoding) one program per token would leave the device idle: there a program takes a few
ids of one token through all matrices and leaves a partial sum, and a second kernel adds those.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none, reportReturnType=none
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.device_triton import (
    ACTIVATION_CODES,
    activate,
    activation_grads,
    block_size,
    load_rows,
)
from airmoe.kernels.rows_triton import (
    pair,
    query_times_rows,
    row_dots,
    row_sums,
    row_totals,
    sort_entries,
)
from airmoe.kernels.token_experts import SMALL_BATCH, ExpertTables, empty_pre

ELEMENTS_BLOCK = 1024  # of the elementwise kernels
COMPACT_BLOCK = 2048  # pool positions looked at together
ENOUGH_PROGRAMS = 2 * 132
FEWEST_ROWS, MOST_ROWS = 4, 16  # of one program: fewer make more partial sums
TILE_ELEMENTS = 8192  # [rows, columns] of one fetch
ADD_PARTS, ADD_COLUMNS = 32, 64  # tile of the kernel that adds the partial sums
NUM_WARPS = 4


def token_experts(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    activation: str,
    expert_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, D], and the pre-activations of up and gate [T, K * S], empty where not kept."""
    tables = ExpertTables(gate, up, down, activation, expert_size).contiguous()
    hidden, weights, expert_ids = hidden.contiguous(), weights.contiguous(), expert_ids.contiguous()
    num_tokens, top_k = expert_ids.shape
    pre = empty_pre(hidden, gate, (num_tokens, top_k * expert_size), keep)
    if 0 < num_tokens <= SMALL_BATCH and top_k > 0:
        kept = pre if keep else (None, None)
        return _forward_of_few(hidden, tables, weights, expert_ids, kept), *pre
    neurons = tables.neurons(expert_ids)
    both = [tables.up] if tables.gate is None else [tables.up, tables.gate]
    pre_up, pre_gate = pair(row_dots(hidden, both, neurons, hidden.dtype))
    weighted = _weigh(pre_up, pre_gate, weights, tables)
    output = row_totals([(weighted, tables.down)], neurons, hidden.dtype)
    if keep:
        pre = pre_up, pre[1] if pre_gate is None else pre_gate
    return output, *pre


def token_experts_backward(call: Any, want: set[str]) -> dict[str, Tensor]:
    """Gradients of those of hidden, gate, up, down and weights that are wanted."""
    tables = ExpertTables(call.gate, call.up, call.down, call.activation, call.expert_size)
    tables, hidden, grad_output = tables.contiguous(), call.hidden.contiguous(), call.grad_output
    pre_gate = None if tables.gate is None else call.pre_gate
    weights, expert_ids = call.weights.contiguous(), call.expert_ids.contiguous()
    grads: dict[str, Tensor] = {}
    neurons = tables.neurons(expert_ids)
    activations = (call.pre_up, pre_gate, weights, tables)
    entries = sort_entries(neurons, tables.up.shape[0]) if want & {"gate", "up", "down"} else None
    if entries is not None and "down" in want:
        factors = [_weigh(*activations)]
        (grads["down"],) = row_sums(factors, grad_output, entries, tables.down.dtype)
    if want - {"down"}:
        (grad_weighted,) = row_dots(grad_output, [tables.down], neurons, torch.float32)
        grad_up, grad_gate, grads["weights"] = _weigh_grads(grad_weighted, *activations)
        del grad_weighted
        through = {"up": (grad_up, tables.up)}
        if tables.gate is not None and grad_gate is not None:
            through["gate"] = (grad_gate, tables.gate)
        if "hidden" in want:
            grads["hidden"] = row_totals(list(through.values()), neurons, hidden.dtype)
        names = [name for name in through if name in want]
        if entries is not None and names:
            factors = [through[name][0] for name in names]
            sums = row_sums(factors, hidden, entries, tables.up.dtype)
            grads.update(zip(names, sums, strict=True))
    return grads


@triton.jit
def _operands(up, gate, weights, size, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    up_values = tl.load(up + places, mask=mask, other=0.0).to(tl.float32)
    gate_values = up_values
    if gate is not None:
        gate_values = tl.load(gate + places, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(weights + places // SIZE, mask=mask, other=0.0).to(tl.float32)
    return places, mask, up_values, gate_values, factors


@triton.jit
def _weigh_kernel(
    up, gate, weights, weighted, size,
    SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places, mask, up_values, gate_values, factors = _operands(up, gate, weights, size, SIZE, BLOCK)
    exact: tl.constexpr = up.dtype.element_ty == tl.float32
    values = activate(up_values, gate_values, ACTIVATION, exact) * factors
    tl.store(weighted + places, values.to(weighted.dtype.element_ty), mask=mask)


def _weigh(up: Tensor, gate: Tensor | None, weights: Tensor, tables: ExpertTables) -> Tensor:
    """Activated values times their expert's weight: [T, K * S] in the dtype of `up`."""
    weighted = torch.empty_like(up)
    _weigh_kernel[(triton.cdiv(up.numel(), ELEMENTS_BLOCK),)](
        up, gate, weights, weighted, up.numel(),
        SIZE=tables.size, ACTIVATION=ACTIVATION_CODES[tables.activation], BLOCK=ELEMENTS_BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return weighted


@triton.jit
def _weigh_grads_kernel(
    grad_weighted, up, gate, weights, grad_up, grad_gate, grad_weights, size,
    SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places, mask, up_values, gate_values, factors = _operands(up, gate, weights, size, SIZE, BLOCK)
    grad = tl.load(grad_weighted + places, mask=mask, other=0.0)
    exact: tl.constexpr = up.dtype.element_ty == tl.float32
    active, grad_up_values, grad_gate_values = activation_grads(
        up_values, gate_values, grad * factors, ACTIVATION, exact
    )
    tl.store(grad_up + places, grad_up_values.to(grad_up.dtype.element_ty), mask=mask)
    if grad_gate is not None:
        tl.store(grad_gate + places, grad_gate_values.to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_weights + places, (grad * active).to(grad_weights.dtype.element_ty), mask=mask)


def _weigh_grads(
    grad: Tensor, up: Tensor, gate: Tensor | None, weights: Tensor, tables: ExpertTables
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of the pre-activations (up, gate) [T, K * S] and of the weights [T, K]."""
    size = tables.size
    grad_up, grad_gate = torch.empty_like(up), None if gate is None else torch.empty_like(gate)
    wide = torch.float32 if size > 1 else weights.dtype
    products = torch.empty(up.shape, dtype=wide, device=up.device)
    _weigh_grads_kernel[(triton.cdiv(up.numel(), ELEMENTS_BLOCK),)](
        grad, up, gate, weights, grad_up, grad_gate, products, up.numel(),
        SIZE=size, ACTIVATION=ACTIVATION_CODES[tables.activation], BLOCK=ELEMENTS_BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    if size > 1:
        products = products.view(*weights.shape, size).sum(-1).to(weights.dtype)
    return grad_up, grad_gate, products


def small_tile_shape(num_tokens: int, num_neurons: int, dim: int) -> tuple[int, int]:
    """(rows, columns) of one program's tile: powers of two."""
    wanted = num_tokens * num_neurons // ENOUGH_PROGRAMS
    rows = min(max(1 << max(wanted, 1).bit_length() - 1, FEWEST_ROWS), MOST_ROWS)
    columns = block_size(dim, TILE_ELEMENTS // rows)
    return rows, columns


@triton.jit
def _small_batch_kernel(
    hidden, gate, up, down, weights, expert_ids, pre_up, pre_gate, partial, num_neurons,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    mask = places < num_neurons
    slots = token * (num_neurons // SIZE) + places // SIZE
    experts = tl.load(expert_ids + slots, mask=mask, other=0).to(tl.int64)
    factors = tl.load(weights + slots, mask=mask, other=0.0).to(tl.float32)
    rows = experts * SIZE + places % SIZE
    up_total, gate_total, _ = query_times_rows(
        hidden + token * DIM, up, gate, rows, mask, DIM, BLOCK_J, BLOCK_D, False
    )
    up_dots = tl.sum(up_total, axis=1)
    gate_dots = up_dots if gate is None else tl.sum(gate_total, axis=1)
    if pre_up is not None:
        kept = token * num_neurons + places
        tl.store(pre_up + kept, up_dots.to(pre_up.dtype.element_ty), mask=mask)
        if gate is not None:
            tl.store(pre_gate + kept, gate_dots.to(pre_gate.dtype.element_ty), mask=mask)
    exact: tl.constexpr = hidden.dtype.element_ty == tl.float32
    weighted = activate(up_dots, gate_dots, ACTIVATION, exact) * factors
    part = token * tl.num_programs(1) + tl.program_id(1)
    for column in range(0, DIM, BLOCK_D):
        columns = column + tl.arange(0, BLOCK_D)
        inside = columns < DIM
        down_values = load_rows(down, rows, mask, columns, DIM)
        total = tl.sum(weighted[:, None] * down_values.to(tl.float32), axis=0)
        tl.store(partial + part * DIM + columns, total, mask=inside)


@triton.jit
def _add_partial_kernel(
    partial, output, num_parts,
    DIM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < DIM
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        own = token * num_parts + parts
        total += load_rows(partial, own, parts < num_parts, columns, DIM)
    summed = tl.sum(total, axis=0).to(output.dtype.element_ty)
    tl.store(output + token * DIM + columns, summed, mask=inside)


def _forward_of_few(
    hidden: Tensor,
    tables: ExpertTables,
    weights: Tensor,
    expert_ids: Tensor,
    pre: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """[T, D]; the pre-activations are written to those of `pre` (up, gate) [T, K * S] there are."""
    num_tokens, dim = hidden.shape
    num_neurons = expert_ids.shape[1] * tables.size
    block_j, block_d = small_tile_shape(num_tokens, num_neurons, dim)
    num_parts = triton.cdiv(num_neurons, block_j)
    partial = torch.empty(num_tokens, num_parts, dim, dtype=torch.float32, device=hidden.device)
    _small_batch_kernel[(num_tokens, num_parts)](
        hidden, tables.gate, tables.up, tables.down, weights, expert_ids, *pre, partial,
        num_neurons, SIZE=tables.size, DIM=dim, BLOCK_J=block_j, BLOCK_D=block_d,
        ACTIVATION=ACTIVATION_CODES[tables.activation], num_warps=NUM_WARPS,
    )  # fmt: skip
    output = torch.empty_like(hidden)
    columns = block_size(dim, ADD_COLUMNS)
    _add_partial_kernel[(num_tokens, triton.cdiv(dim, columns))](
        partial, output, num_parts,
        DIM=dim, BLOCK_P=ADD_PARTS, BLOCK_D=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return output


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
    """See `token_experts.compact_gates`."""
    (num_rows, pool), device = gates.shape, gates.device
    expert_ids = torch.empty(num_rows, count, dtype=pools.dtype, device=device)
    weights = torch.empty(num_rows, count, dtype=gates.dtype, device=device)
    _compact_kernel[(num_rows,)](
        gates.contiguous(), pools.contiguous(), cell_of_row, token_ids, expert_ids, weights,
        POOL=pool, COUNT=count, BLOCK_M=min(triton.next_power_of_2(pool), COMPACT_BLOCK),
        BLOCK_C=min(triton.next_power_of_2(count), COMPACT_BLOCK), num_warps=NUM_WARPS,
    )  # fmt: skip
    return expert_ids, weights
