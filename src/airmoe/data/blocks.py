"""Blocks of tokens out of memory-mapped shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from airmoe.data.manifest import PREPARE_AGAIN, SplitInfo
from airmoe.data.shards import map_shard
from airmoe.errors import ConfigError


class BlockDataset(Dataset[dict[str, Tensor]]):
    """Block i is tokens [i * block_size, (i + 1) * block_size) of all shards one after another.

    What is left at the end, less than a block, is not used. Shards are opened when first touched,
    so the dataset can be pickled to, or forked into, the workers of a DataLoader.
    """

    def __init__(self, folder: Path, split: SplitInfo, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.num_tokens = split.tokens
        self._folder = folder
        self._files = [shard.file for shard in split.shards]
        self._starts = np.cumsum([0] + [shard.tokens for shard in split.shards])  # [shards + 1]
        self._vocab_size = vocab_size
        self._maps: dict[int, np.ndarray[Any, np.dtype[np.uint32]]] = {}

    def __len__(self) -> int:
        return self.num_tokens // self.block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        tokens = self._read(index * self.block_size)
        input_ids = torch.from_numpy(tokens.astype(np.int64))  # [block_size]
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def _read(self, start: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The block that starts there, out of one shard or several."""
        pieces = []
        stop = start + self.block_size
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begin = start - int(self._starts[shard])
            piece = self._shard(shard)[begin : begin + stop - start]
            if piece.max() >= self._vocab_size:
                raise self._bad_token(shard, begin, piece)
            pieces.append(piece)
            start += len(piece)
            shard += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _shard(self, shard: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        if shard not in self._maps:
            # A plain view: slices of np.memmap cost a Python call each.
            self._maps[shard] = map_shard(self._folder / self._files[shard]).view(np.ndarray)
        return self._maps[shard]

    def _bad_token(self, shard: int, begin: int, piece: np.ndarray[Any, Any]) -> ConfigError:
        at = int(np.argmax(piece >= self._vocab_size))
        return ConfigError(
            "data",
            int(piece[at]),
            f"is no token id below vocab_size = {self._vocab_size}, at position {begin + at} of "
            f"{self._folder / self._files[shard]}",
            f"The shard is damaged. {PREPARE_AGAIN}",
        )
