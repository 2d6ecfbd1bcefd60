"""Files that may be compressed, read as a stream of bytes that notices a missing end."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from airmoe.errors import ConfigError, require

COMPRESSIONS = (".gz", ".xz", ".zst")

_CHUNK_BYTES = 1 << 17
# So few packed bytes go into a decompressor at once that little comes out: zstd makes up to
# 128 KiB of 4 bytes, xz about 7 KiB of one.
_STEP_BYTES = 256
_WINDOW_BYTES = 1 << 27  # memory for unpacking; the zstd command has the same limit


def corpus_error(place: object, rule: str, remedy: str) -> ConfigError:
    """Text that cannot be read, and where it is."""
    return ConfigError("corpus", str(place), rule, remedy)


@dataclass(frozen=True)
class OpenFile:
    """The unpacked bytes of a file, and the file itself: its position tells how far we are."""

    content: IO[bytes]
    packed: IO[bytes]


@contextmanager
def open_bytes(path: Path) -> Iterator[OpenFile]:
    """Open `path` for reading; the end of its name says how it is compressed.

    Memory stays small however far a file unpacks. Data that is cut short or damaged raises
    `ConfigError` from the block that reads it.
    """
    with path.open("rb") as packed:
        try:
            yield OpenFile(_unpacked(packed, path.suffix), packed)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, _BadFrameError) as error:
            if "emory" in str(error):  # what zstd and xz say of a window over the limit
                rule = f"needs more than {_WINDOW_BYTES >> 20} MiB of memory to unpack"
                remedy = "Pack it again with a smaller window, without --long or --ultra."
            else:
                rule = f"is cut short or damaged near byte {packed.tell()} ({error})"
                remedy = "Fetch the file again, or unpack what can be read and use that."
            raise corpus_error(path, rule, remedy) from error


def _unpacked(packed: IO[bytes], ending: str) -> IO[bytes]:
    if ending == ".gz":
        return gzip.open(packed)  # type: ignore[return-value]
    if ending == ".xz":
        frames = _Frames(packed, lambda: lzma.LZMADecompressor(memlimit=_WINDOW_BYTES), padding=4)
        return io.BufferedReader(frames, _CHUNK_BYTES)
    if ending == ".zst":
        zstandard = require("zstandard", "to read .zst files")
        zstd = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        frames = _Frames(packed, zstd.decompressobj, error=zstandard.ZstdError)
        return io.BufferedReader(frames, _CHUNK_BYTES)
    return packed


class _BadFrameError(Exception):
    """Compressed data that is damaged or ends too early."""


class _Frames(io.RawIOBase):
    """Unpacks frame after frame.

    The libraries' own readers have no memory limit (xz), or take a truncated file for a whole one
    (zstd).
    """

    def __init__(
        self,
        packed: IO[bytes],
        new_frame: Callable[[], Any],
        *,
        error: type[Exception] = lzma.LZMAError,
        padding: int = 0,
    ) -> None:
        self._packed = packed
        self._new_frame = new_frame
        self._error = error
        self._padding = padding  # zeros after a frame come in multiples of this; 0: none allowed
        self._frame: Any = None  # the frame being unpacked, None between frames
        self._after_frame = False
        self._rest = memoryview(b"")  # packed bytes that were read but not unpacked yet
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            self._rest = self._rest or memoryview(self._packed.read(_CHUNK_BYTES))
            if not self._rest:
                if self._frame is not None:
                    raise _BadFrameError("the last frame has no end")
                return 0
            self._ready = memoryview(self._unpack(bytes(self._rest[:_STEP_BYTES])))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, step: bytes) -> bytes:
        if self._frame is None:
            zeros = bytes(self._padding)
            if zeros and self._after_frame and step.startswith(zeros):
                self._rest = self._rest[len(zeros) :]
                return b""
            self._frame = self._new_frame()
        try:
            unpacked = self._frame.decompress(step)
        except self._error as error:
            raise _BadFrameError(str(error)) from error
        unused = len(self._frame.unused_data) if self._frame.eof else 0
        self._rest = self._rest[len(step) - unused :]
        if self._frame.eof:
            self._frame, self._after_frame = None, True
        return unpacked
