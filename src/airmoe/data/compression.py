"""Files that may be compressed, read as a stream of bytes that notices a missing end."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from airmoe.data.optional import require
from airmoe.errors import ConfigError

COMPRESSIONS = (".gz", ".xz", ".zst")

_CHUNK_BYTES = 1 << 17


@dataclass(frozen=True)
class OpenFile:
    """The unpacked bytes of a file, and the file itself: its position tells how far we are."""

    content: IO[bytes]
    packed: IO[bytes]


@contextmanager
def open_bytes(path: Path) -> Iterator[OpenFile]:
    """Open `path` for reading; its last ending says how it is compressed.

    Data that is cut short or damaged raises `ConfigError` from the block that reads it.
    """
    with path.open("rb") as packed:
        try:
            yield OpenFile(_unpacked(packed, path.suffix), packed)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, _BadZstdError) as error:
            raise ConfigError(
                "corpus",
                str(path),
                f"is cut short or damaged near byte {packed.tell()} ({error})",
                "Fetch the file again, or unpack what is good of it and use that.",
            ) from error


def _unpacked(packed: IO[bytes], ending: str) -> IO[bytes]:
    if ending == ".gz":
        return gzip.open(packed)  # type: ignore[return-value]
    if ending == ".xz":
        return lzma.open(packed)
    if ending == ".zst":
        return io.BufferedReader(_ZstdStream(packed), _CHUNK_BYTES)
    return packed


class _BadZstdError(Exception):
    """zstd data that is damaged or ends too early."""


class _ZstdStream(io.RawIOBase):
    """Unpacks zstd frames. zstandard's own reader takes a truncated file for a whole one."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._zstandard = require("zstandard", "to read .zst files")
        self._packed = packed
        self._frame: Any = None  # the frame being unpacked, None between frames
        self._rest = b""  # packed bytes behind the end of the last frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            chunk = self._rest or self._packed.read(_CHUNK_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise _BadZstdError("the last zstd frame has no end")
                return 0
            self._ready = memoryview(self._unpack(chunk))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, chunk: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            unpacked = self._frame.decompress(chunk)
        except self._zstandard.ZstdError as error:
            raise _BadZstdError(str(error)) from error
        self._rest = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return unpacked
