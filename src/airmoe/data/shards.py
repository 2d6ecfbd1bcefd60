"""Shards: token ids on disk, written document by document and read in blocks.

A shard is a file of little-endian uint32, `train-00000.bin` and on. It ends with the document that
fills it, so no document lies in two, and counting documents tells what is finished.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from airmoe.errors import ConfigError
from airmoe.files import file_sha256

TOKEN_TYPE = np.dtype("<u4")
SHARD_TOKENS = 1 << 24  # 64 MiB

Tokens = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True)
class ShardInfo:
    """One file of tokens."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """Shards in reading order."""

    documents: int
    tokens: int
    shards: tuple[ShardInfo, ...]


class SplitWriter:
    """Appends the documents of one split to shards, and can go on where `synced` was called."""

    def __init__(
        self, folder: Path, split: str, shard_tokens: int, start: SplitInfo | None = None
    ) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._shards = list(start.shards) if start else []
        self.documents = start.documents if start else 0
        self.tokens = start.tokens if start else 0
        self._open_tokens = self.tokens - sum(shard.tokens for shard in self._shards)
        self._stream: IO[bytes] | None = None
        if size := self._open_tokens * TOKEN_TYPE.itemsize:  # what to keep of an unfinished shard
            file = self._file()
            if not file.is_file() or file.stat().st_size < size:
                rule = f"should hold at least {size} bytes of unfinished work but does not"
                remedy = f"Delete {folder} and run prepare again."
                raise ConfigError("prepare.out", str(file), rule, remedy)
            os.truncate(file, size)
            self._stream = file.open("ab")

    def _file(self) -> Path:
        return self._folder / f"{self._split}-{len(self._shards):05d}.bin"

    def add(self, tokens: Tokens) -> bool:
        """Append one document; True if that finished a shard."""
        if self._stream is None:
            self._stream = self._file().open("wb")
        self._stream.write(tokens.astype(TOKEN_TYPE, copy=False).tobytes())
        self.documents += 1
        self.tokens += len(tokens)
        self._open_tokens += len(tokens)
        if self._open_tokens < self._shard_tokens:
            return False
        self.finish_shard()
        return True

    def finish_shard(self) -> None:
        """Close the open shard, if there is one."""
        if self._stream is None:
            return
        self.synced()
        self.close()
        file = self._file()
        self._shards.append(ShardInfo(file.name, self._open_tokens, file_sha256(file)))
        self._open_tokens = 0

    def synced(self) -> SplitInfo:
        """Force everything to disk and say how much that is, an unfinished shard included."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return SplitInfo(self.documents, self.tokens, tuple(self._shards))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class BlockDataset(Dataset[dict[str, Tensor]]):
    """Block i is tokens [i * block_size, (i + 1) * block_size) of all shards one after another.

    Leftover tokens at the end, less than a block, are not used. Shards are memory-mapped when first
    touched, so the dataset can be pickled to, or forked into, the workers of a DataLoader.
    """

    def __init__(self, folder: Path, split: SplitInfo, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens = split.tokens
        self._files = [folder / shard.file for shard in split.shards]
        self._ends = np.cumsum([shard.tokens for shard in split.shards])  # [shards]

    def __len__(self) -> int:
        return self.num_tokens // self.block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        left = self.block_size
        shard = int(np.searchsorted(self._ends, index * left, side="right"))
        begin = index * left - int(self._ends[shard])  # from the end of the shard, so below 0
        pieces = []
        while left:
            pieces.append(self._shards[shard][begin:][:left])
            left -= len(pieces[-1])
            shard, begin = shard + 1, 0
        input_ids = torch.from_numpy(np.concatenate(pieces, dtype=np.int64))  # [block_size]
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    @cached_property
    def _shards(self) -> list[Tokens]:
        # Plain views: slices of np.memmap cost a Python call each.
        return [np.memmap(file, TOKEN_TYPE, mode="r").view(np.ndarray) for file in self._files]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_shards"}
