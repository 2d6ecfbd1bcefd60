"""Jitter as a pure function of (seed, micro-batch, stage, token or codeword, expert).

Recomputed forwards draw the same numbers, and no generator state is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from airmoe.kernels.backend import use_triton
from airmoe.kernels.noise import reference
from airmoe.kernels.noise.reference import normal, uniform_index


class Stage(IntEnum):
    """What a key is for; different stages never share numbers."""

    SHORTLIST = 1
    TOKEN = 2
    CLUSTER = 3
    SUBKEY = 4
    REPLACE = 5
    FIRST = 6
    START = 7


@dataclass(frozen=True)
class Noise:
    """Normal jitter of one stage: one stream per row (token or codeword), indexed by column."""

    row_keys: Tensor  # [rows] int32
    std: float

    def rows(self, chosen: Tensor | slice, columns: Tensor) -> Tensor:
        """Jitter for some rows at all the given columns: [rows, columns] float32."""
        keys = self.row_keys[chosen]
        if use_triton(keys):
            from airmoe.kernels.noise.fill_triton import noise_rows

            return noise_rows(keys, columns, self.std)
        return normal(keys.unsqueeze(-1), columns).mul_(self.std)

    def pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Jitter for (row, column) pairs of one broadcast shape."""
        keys = self.row_keys[rows]
        if use_triton(keys):
            from airmoe.kernels.noise.fill_triton import noise_pairs

            return noise_pairs(keys, columns, self.std)
        return normal(keys, columns).mul_(self.std)


def combine(first: Tensor, *rest: Tensor | int) -> Tensor:
    """Fold whole numbers, at most three after the first, into one int64 key, broadcasting.

    Tensors are int64, scalars or vectors of one length; numbers are not negative.
    """
    if use_triton(first):
        from airmoe.kernels.noise.keys_triton import combine_keys

        tensors = [part for part in rest if isinstance(part, Tensor)]
        return combine_keys(first, tensors, [-1 if isinstance(p, Tensor) else p for p in rest])
    return reference.combine(first, *rest)


def make_noise(key: Tensor, stage: Stage, num_rows: int, std: float) -> Noise:
    """One stream per row from a micro-batch key (int64 scalar)."""
    rows = torch.arange(num_rows, device=key.device)
    return Noise(combine(key, int(stage), rows).to(torch.int32), std)


__all__ = ["Noise", "Stage", "combine", "make_noise", "normal", "uniform_index"]
