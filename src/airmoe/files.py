"""Files: written whole or not at all, locked, hashed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from airmoe.errors import ConfigError

LOCK = "lock"  # file in a locked folder; never replaced


def write_json(path: Path, values: Any) -> None:
    """Replace `path` by the JSON of `values` in one step."""
    write_bytes(path, (json.dumps(values, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` in one step."""
    draft = path.with_name(path.name + ".draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)  # it would take room on a full disk, and a new run's folder
        raise
    sync_folder(path.parent)


def disk_is_full(error: BaseException) -> bool:
    """Whether a write failed for want of space or quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def read_json(path: Path) -> Any:
    """The JSON of a file; ValueError if it is none."""
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """Anything wrong with the text is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def can_be_written(text: str) -> bool:
    """Whether a UTF-8 file and a path can hold it, unlike zero bytes and lone surrogates."""
    return "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)


def file_sha256(path: Path) -> str:
    """Hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(values: Any) -> str:
    """Of plain values, whatever the order of their names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(folder: Path, field: str, work: str) -> Iterator[None]:
    """Keep other processes out of a folder; the system drops the lock if this process dies.

    `field` is what the user called the folder, `work` what is done there: "is being trained".
    """
    handle = _lock(folder, field, work)
    try:
        note = f"process {os.getpid()} on {os.uname().nodename}\n".encode()
        os.pwrite(handle, note, 0)
        os.ftruncate(handle, len(note))
        yield
    finally:
        os.close(handle)  # also unlocks


def check_unlocked(folder: Path, field: str, work: str) -> None:
    """Raise if another process works in that folder now."""
    if (folder / LOCK).exists():
        os.close(_lock(folder, field, work))


def _lock(folder: Path, field: str, work: str) -> int:
    while True:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 1000, 0).decode(errors="replace").strip()
            os.close(handle)
            raise ConfigError(
                field,
                str(folder),
                f"{work} by {holder or 'another process'} at this moment",
                "Wait for it, or stop it first.",
            ) from error
        try:
            if os.path.samestat(os.fstat(handle), os.stat(folder / LOCK)):
                return handle
        except FileNotFoundError:
            pass  # the last holder removed the file before we locked it
        os.close(handle)


class KeptStream:
    """A stream whose reader may go away: `airmoe train tiny | head -1` trains to the end."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._unless_lost(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._unless_lost(self._stream.flush)

    def _unless_lost(self, job: Callable[[], Any]) -> Any:
        try:
            return job()
        except OSError:  # no reader, no terminal, a full disk behind a redirection
            with suppress(OSError):  # it may have no number
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def sync_tree(folder: Path) -> None:
    """Bring every file of a folder, and the folder itself, to the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep_streams() -> None:
    """Let this process go on where the reader of its output goes away, or where it has none."""
    sys.stdout, sys.stderr = (
        cast(Any, KeptStream(stream or open(os.devnull, "w")))  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr)
    )
