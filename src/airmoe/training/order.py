"""The order in which training sees the blocks: a function of seed and epoch, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class EpochOrder(Sampler[int]):
    """A new shuffle for every epoch, cut to whole optimizer steps.

    Resuming needs no saved state, and any number of processes shares out the same order.
    """

    def __init__(self, num_blocks: int, batch_size: int, seed: int) -> None:
        self._num_blocks, self._seed = num_blocks, seed
        self._used = num_blocks // batch_size * batch_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._used

    def __iter__(self) -> Iterator[int]:
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return iter(torch.randperm(self._num_blocks, generator=random)[: self._used].tolist())
