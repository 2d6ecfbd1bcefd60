"""Shards: token ids on disk, written document by document and read in blocks.

A shard is a file of little-endian uint32, `train-00000.bin` and on. It ends with the document that
fills it, so no document lies in two, and counting documents tells what is finished.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from airmoe.errors import ConfigError

TOKEN_TYPE = np.dtype("<u4")
SHARD_TOKENS = 1 << 24  # 64 MiB
PREPARE_AGAIN = "Run the `airmoe prepare` that made it again, with another --out, and use that."

_BUFFER_BYTES = 1 << 20

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

    documents: int = 0
    tokens: int = 0
    shards: tuple[ShardInfo, ...] = ()


@dataclass(frozen=True)
class WriterState:
    """How far a split is on disk: its finished shards and the first tokens of the next one."""

    finished: SplitInfo = field(default_factory=SplitInfo)
    open_documents: int = 0
    open_tokens: int = 0


class SplitWriter:
    """Appends the documents of one split to shards, and can go on from any `WriterState`."""

    def __init__(self, folder: Path, split: str, state: WriterState, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._finished = state.finished
        self._open_documents, self._open_tokens = state.open_documents, state.open_tokens
        self._stream: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        if state.open_tokens:
            self._stream, self._hash = _reopen(self._file(), state.open_tokens)

    @property
    def tokens(self) -> int:
        return self._finished.tokens + self._open_tokens

    def _file(self) -> Path:
        return self._folder / f"{self._split}-{len(self._finished.shards):05d}.bin"

    def add(self, tokens: Tokens) -> bool:
        """Append one document; True if that finished a shard."""
        if self._stream is None:
            self._stream, self._hash = self._file().open("wb", _BUFFER_BYTES), hashlib.sha256()
        content = tokens.astype(TOKEN_TYPE, copy=False).tobytes()
        self._stream.write(content)
        self._hash.update(content)
        self._open_documents += 1
        self._open_tokens += len(tokens)
        if self._open_tokens < self._shard_tokens:
            return False
        self.finish_shard()
        return True

    def finish_shard(self) -> None:
        """Close the open shard, if there is one."""
        if self._stream is None:
            return
        _sync(self._stream)
        self.close()
        shard = ShardInfo(self._file().name, self._open_tokens, self._hash.hexdigest())
        documents = self._finished.documents + self._open_documents
        self._finished = SplitInfo(documents, self.tokens, (*self._finished.shards, shard))
        self._open_documents = self._open_tokens = 0

    def saved_state(self) -> WriterState:
        """Force everything to disk and say how much that is."""
        if self._stream is not None:
            _sync(self._stream)
        return WriterState(self._finished, self._open_documents, self._open_tokens)

    def close(self) -> None:
        """Let go of the file; the next writer cuts off what was not saved."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _reopen(file: Path, tokens: int) -> tuple[IO[bytes], Any]:
    """An unfinished shard, cut after `tokens`, with the hash of what stays."""
    size = tokens * TOKEN_TYPE.itemsize
    if not file.is_file() or file.stat().st_size < size:
        rule = f"should hold at least {size} bytes of unfinished work but does not"
        remedy = f"Delete {file.parent} and run prepare again."
        raise ConfigError("prepare.out", str(file), rule, remedy)
    os.truncate(file, size)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return file.open("ab", _BUFFER_BYTES), digest


class BlockDataset(Dataset[dict[str, Tensor]]):
    """Block i is tokens [i * block_size, (i + 1) * block_size) of all shards one after another.

    Leftover tokens at the end, less than a block, are not used. Shards are memory-mapped when first
    touched, so the dataset can be pickled to, or forked into, the workers of a DataLoader.
    """

    def __init__(self, folder: Path, split: SplitInfo, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.num_tokens = split.tokens
        self._files = [folder / shard.file for shard in split.shards]
        self._starts = np.cumsum([0] + [shard.tokens for shard in split.shards])  # [shards + 1]
        self._vocab_size = vocab_size
        self._maps: dict[int, Tokens] = {}

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

    def _read(self, start: int) -> Tokens:
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

    def _shard(self, shard: int) -> Tokens:
        if shard not in self._maps:
            mapped = np.memmap(self._files[shard], dtype=TOKEN_TYPE, mode="r")
            # A plain view: slices of np.memmap cost a Python call each.
            self._maps[shard] = mapped.view(np.ndarray)
        return self._maps[shard]

    def _bad_token(self, shard: int, begin: int, piece: Tokens) -> ConfigError:
        at = int(np.argmax(piece >= self._vocab_size))
        return ConfigError(
            "data",
            int(piece[at]),
            f"is no token id below vocab_size = {self._vocab_size}, at position {begin + at} of "
            f"{self._files[shard]}",
            f"The shard is damaged. {PREPARE_AGAIN}",
        )
