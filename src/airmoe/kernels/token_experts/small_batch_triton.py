"""Experts over per-token lists for a few tokens (decoding).

One program per token would leave the device idle. Here a program takes a few ids of one token
through all matrices and leaves a partial sum; a second kernel adds those of each token.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cell_experts.activations_triton import ACTIVATION_CODES, activate

ENOUGH_PROGRAMS = 2 * 132
FEWEST_ROWS, MOST_ROWS = 4, 16  # of one program: fewer make more partial sums
TILE_ELEMENTS = 8192  # [rows, columns] of one fetch
ADD_PARTS, ADD_COLUMNS = 32, 64  # tile of the kernel that adds the partial sums
NUM_WARPS = 4


def tile_shape(num_tokens: int, num_neurons: int, dim: int) -> tuple[int, int]:
    """(rows, columns) of one program's tile: powers of two."""
    wanted = num_tokens * num_neurons // ENOUGH_PROGRAMS
    rows = min(max(1 << max(wanted, 1).bit_length() - 1, FEWEST_ROWS), MOST_ROWS)
    columns = min(max(triton.next_power_of_2(dim), 16), TILE_ELEMENTS // rows)
    return rows, columns


@triton.jit
def _small_batch_kernel(
    hidden, gate, up, down, weights, expert_ids, pre_up, pre_gate, partial, num_neurons,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    mask = places < num_neurons
    slots = token * (num_neurons // SIZE) + places // SIZE
    experts = tl.load(expert_ids + slots, mask=mask, other=0).to(tl.int64)
    factors = tl.load(weights + slots, mask=mask, other=0.0).to(tl.float32)
    rows = experts * SIZE + places % SIZE
    up_total = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    gate_total = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    for column in range(0, DIM, BLOCK_D):
        columns = column + tl.arange(0, BLOCK_D)
        inside = columns < DIM
        values = tl.load(hidden + token * DIM + columns, mask=inside, other=0.0)
        values = values.to(tl.float32)[None, :]
        entries = rows[:, None] * DIM + columns[None, :]
        tile_mask = mask[:, None] & inside[None, :]
        up_values = tl.load(up + entries, mask=tile_mask, other=0.0)
        if GATED:
            gate_values = tl.load(gate + entries, mask=tile_mask, other=0.0)
            gate_total += gate_values.to(tl.float32) * values
        up_total += up_values.to(tl.float32) * values
    up_dots = tl.sum(up_total, axis=1)
    gate_dots = up_dots
    if GATED:
        gate_dots = tl.sum(gate_total, axis=1)
    if KEEP:
        kept = token * num_neurons + places
        tl.store(pre_up + kept, up_dots.to(pre_up.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(pre_gate + kept, gate_dots.to(pre_gate.dtype.element_ty), mask=mask)
    exact: tl.constexpr = hidden.dtype.element_ty == tl.float32
    weighted = activate(up_dots, gate_dots, ACTIVATION, exact) * factors
    part = token * tl.num_programs(1) + tl.program_id(1)
    for column in range(0, DIM, BLOCK_D):
        columns = column + tl.arange(0, BLOCK_D)
        inside = columns < DIM
        down_values = tl.load(
            down + rows[:, None] * DIM + columns[None, :],
            mask=mask[:, None] & inside[None, :],
            other=0.0,
        )
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
        total += tl.load(
            partial + (token * num_parts + parts)[:, None] * DIM + columns[None, :],
            mask=(parts < num_parts)[:, None] & inside[None, :],
            other=0.0,
        )
    tl.store(
        output + token * DIM + columns,
        tl.sum(total, axis=0).to(output.dtype.element_ty),
        mask=inside,
    )


def small_batch(
    hidden: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    pre: tuple[Tensor, Tensor],
    activation: str,
    expert_size: int,
    keep: bool,
) -> Tensor:
    """[T, D]; with `keep` the pre-activations are written to `pre` (up, gate) [T, K * S]."""
    num_tokens, dim = hidden.shape
    num_neurons = expert_ids.shape[1] * expert_size
    block_j, block_d = tile_shape(num_tokens, num_neurons, dim)
    num_parts = triton.cdiv(num_neurons, block_j)
    partial = torch.empty(num_tokens, num_parts, dim, dtype=torch.float32, device=hidden.device)
    _small_batch_kernel[(num_tokens, num_parts)](
        hidden, up if gate is None else gate, up, down, weights, expert_ids, *pre, partial,
        num_neurons, SIZE=expert_size, DIM=dim, BLOCK_J=block_j, BLOCK_D=block_d,
        ACTIVATION=ACTIVATION_CODES[activation], GATED=gate is not None, KEEP=keep,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    output = torch.empty_like(hidden)
    columns = min(max(triton.next_power_of_2(dim), 16), ADD_COLUMNS)
    _add_partial_kernel[(num_tokens, triton.cdiv(dim, columns))](
        partial, output, num_parts,
        DIM=dim, BLOCK_P=ADD_PARTS, BLOCK_D=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return output
