"""Shards: token ids as raw little-endian uint32, `train-00000.bin` and on.

A shard ends with the document that fills it, so no document lies in two, and what is finished can
be told by counting documents.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from airmoe.data.manifest import PREPARE_AGAIN, ShardInfo, SplitInfo
from airmoe.errors import ConfigError

TOKEN_TYPE = np.dtype("<u4")
SHARD_TOKENS = 1 << 24  # 64 MiB

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class WriterState:
    """How far a split is on disk: its finished shards and the first tokens of the next one."""

    finished: SplitInfo = field(default_factory=SplitInfo)
    open_documents: int = 0
    open_tokens: int = 0


class SplitWriter:
    """Appends the documents of one split to shards, and can go on from any `WriterState`."""

    def __init__(self, folder: Path, split: str, state: WriterState, shard_tokens: int) -> None:
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._shards = list(state.finished.shards)
        self._documents = state.finished.documents
        self._tokens = state.finished.tokens
        self._open_documents = state.open_documents
        self._open_tokens = state.open_tokens
        self._stream: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        if state.open_tokens:
            self._stream, self._hash = _reopen(self._file(), state.open_tokens)

    @property
    def tokens(self) -> int:
        return self._tokens + self._open_tokens

    def _file(self) -> Path:
        return self._folder / f"{self._split}-{len(self._shards):05d}.bin"

    def add(self, tokens: np.ndarray[Any, np.dtype[np.uint32]]) -> bool:
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
        file = self._file()
        _sync(self._stream)
        self._stream.close()
        self._stream = None
        self._shards.append(ShardInfo(file.name, self._open_tokens, self._hash.hexdigest()))
        self._documents += self._open_documents
        self._tokens += self._open_tokens
        self._open_documents = self._open_tokens = 0

    def saved_state(self) -> WriterState:
        """Force everything to disk and say how much that is."""
        if self._stream is not None:
            _sync(self._stream)
        finished = SplitInfo(self._documents, self._tokens, tuple(self._shards))
        return WriterState(finished, self._open_documents, self._open_tokens)

    def close(self) -> None:
        """Let go of the file; what was not saved is cut off by the next writer."""
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
        raise ConfigError(
            "prepare.out",
            str(file),
            f"should hold at least {size} bytes of unfinished work but does not",
            f"Delete {file.parent} and run prepare again.",
        )
    os.truncate(file, size)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return file.open("ab", _BUFFER_BYTES), digest


def check_shard(folder: Path, shard: ShardInfo, *, verify: bool) -> None:
    """Raise unless the file is there, has its size and, if asked, its content."""
    file = folder / shard.file
    remedy = f"Copy it again, or: {PREPARE_AGAIN}"
    if not file.is_file():
        raise ConfigError("data", str(file), "is in the manifest but not in the folder", remedy)
    size, expected = file.stat().st_size, shard.tokens * TOKEN_TYPE.itemsize
    if size != expected:
        raise ConfigError("data", str(file), f"has {size} bytes instead of {expected}", remedy)
    if not verify:
        return
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    if digest.hexdigest() != shard.sha256:
        raise ConfigError("data", str(file), "is damaged: its sha256 is not the manifest's", remedy)


def map_shard(file: Path) -> np.memmap[Any, np.dtype[np.uint32]]:
    """The tokens of a shard, read from disk when touched."""
    return np.memmap(file, dtype=TOKEN_TYPE, mode="r")
