"""Expert -> its (cell, position) entries, so that gradients can be summed without atomics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import use_triton


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
