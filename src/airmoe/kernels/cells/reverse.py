"""Expert -> its (cell, position) entries, so that gradients can be summed without atomics.

The experts are cut into parts with about equally many entries, because the partial sums of all of
them would be a [G, M, D] tensor. Cells write the partial sums of a part one after another, and each
expert then gathers its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import use_triton

# Memory for the partial sums of one part. Where there are many rows, several matrices [N, M] are
# there at the same time, larger than these.
PART_BYTES, PART_BYTES_OF_MANY_ROWS = 512 * 2**20, 256 * 2**20
MANY_ROWS = 32_768


@dataclass(frozen=True)
class ReverseIndex:
    """Where each expert of a table occurs in the pools [G, M]."""

    entries: Tensor  # [G * M] int32: cell * M + position, expert by expert, cells ascending
    starts: Tensor  # [E + 1] int32: first entry of each expert

    def sum_by_expert(self, values: Tensor) -> Tensor:
        """Add up what an expert has in all its cells: [G, M] -> [E], in a fixed order."""
        if use_triton(values):
            from airmoe.kernels.cells.sum_by_expert_triton import sum_by_expert_op

            return sum_by_expert_op(values, self.entries, self.starts)
        wide = torch.float64 if values.is_floating_point() else torch.int64
        ordered = values.flatten()[self.entries].to(wide).cumsum(0)
        ends = torch.nn.functional.pad(ordered, (1, 0))[self.starts]
        return ends.diff().to(values.dtype)


@dataclass(frozen=True)
class Parts:
    """Ranges of experts whose partial sums fit into memory together."""

    experts: Tensor  # [parts + 1] int32: first expert of each part
    positions: Tensor  # [G, parts + 1] int32: first pool position of each part
    shifts: Tensor  # [G, parts] int32: row of a partial sum = its position + this
    count: int
    rows: int  # the most partial sums of one part


def make_reverse(pools: Tensor, num_experts: int) -> ReverseIndex:
    """pools [G, M], no expert twice in a row -> where each expert is."""
    if pools.numel() >= 2**31:
        raise ConfigError(
            "cells.pools",
            tuple(pools.shape),
            "must have fewer than 2**31 entries, which are numbered in 32 bits",
            "Use fewer codewords or shorter shortlists.",
        )
    if num_experts <= 2**16:  # a GPU takes a pass over all keys for every byte of one
        keys, entries = (pools.flatten() - 2**15).to(torch.int16).sort(stable=True)
        ordered = keys.int() + 2**15
    else:
        ordered, entries = pools.flatten().int().sort(stable=True)
    experts = torch.arange(num_experts + 1, device=pools.device, dtype=torch.int32)
    starts = torch.searchsorted(ordered, experts, out_int32=True)
    return ReverseIndex(entries.int(), starts)


def make_parts(reverse: ReverseIndex, pools: Tensor, num_rows: int, row_bytes: int) -> Parts:
    """Cut the experts so that a part's partial sums, `row_bytes` each, fit into memory."""
    total = pools.numel()
    most = PART_BYTES if num_rows < MANY_ROWS else PART_BYTES_OF_MANY_ROWS
    count = max(1, -(-total * row_bytes // most))
    share = -(-total // count)
    marks = torch.arange(count + 1, device=pools.device, dtype=torch.int32) * share
    experts = torch.searchsorted(reverse.starts, marks.clamp_max_(total), out_int32=True)
    # Experts that occur nowhere belong to some part all the same: their gradient is 0.
    experts[:1].zero_()
    experts[-1:].fill_(reverse.starts.shape[0] - 1)
    wanted = experts.to(pools.dtype).expand(pools.shape[0], -1).contiguous()
    positions = torch.searchsorted(pools, wanted, out_int32=True)
    sizes = positions.diff(dim=-1).T.contiguous()  # [parts, G]: along memory sums are quick
    shifts = (sizes.cumsum(-1) - sizes).T - positions[:, :-1]
    # One expert more than a share may be in: it has at most one entry per cell.
    return Parts(experts, positions, shifts.int().contiguous(), count, share + pools.shape[0])
