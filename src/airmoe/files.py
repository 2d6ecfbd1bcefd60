"""Files: written whole or not at all, locked, and JSON read with care."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError

# JSON beyond these limits is not ours, and would cost memory or end in a traceback.
MOST_JSON_BYTES = 64 * 2**20
MOST_JSON_LEVELS = 64  # lists and objects in each other
MOST_JSON_DIGITS = 1_000  # of an integer; Python itself raises above 4,300
LOCK = "lock"  # file in a locked folder; never replaced
CHUNK = 2**22


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
    """The JSON of a file that anybody may have written, by the rules of `parse_json`."""
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would make us wait
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        return parse_json(file.read(MOST_JSON_BYTES + 1))


def parse_json(text: str | bytes) -> Any:
    """JSON from outside; anything wrong with it is a ValueError of one line.

    Refused: text that is not UTF-8, a name given twice in one object, and what is too large, too
    deeply nested, or an integer too long. NaN and infinity pass, because Python writes them.
    """
    if len(text) > MOST_JSON_BYTES:
        raise ValueError(f"it is larger than {MOST_JSON_BYTES:,} bytes")
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        values = json.loads(decoded, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_levels(values)
    return values


_TOO_DEEP = f"it is nested deeper than {MOST_JSON_LEVELS} levels"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it gives {name[:60]!r} twice in one object")
        found[name] = value
    return found


def _integer(digits: str) -> int:
    if len(digits) > MOST_JSON_DIGITS:
        raise ValueError(f"it holds an integer of more than {MOST_JSON_DIGITS:,} digits")
    return int(digits)


def _check_levels(values: Any) -> None:
    level = [values]
    for _ in range(MOST_JSON_LEVELS + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return
        level = [
            child for one in level for child in (one.values() if isinstance(one, dict) else one)
        ]
    raise ValueError(_TOO_DEEP)


def can_be_written(text: str) -> bool:
    """Whether a UTF-8 file and a path can hold it, unlike zero bytes and lone surrogates."""
    return "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)


def file_sha256(path: Path) -> str:
    """Hash of a file's contents, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


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
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        note = f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode()
        os.pwrite(handle, note, 0)
        os.ftruncate(handle, len(note))
        yield
    finally:
        os.close(handle)  # also unlocks


def check_unlocked(folder: Path, field: str, work: str) -> None:
    """Raise if another process works in that folder now."""
    if (folder / LOCK).exists():
        os.close(_lock(folder, field, work))


def _open_lock(folder: Path, field: str) -> int:
    """A plain file, because writing through a link would overwrite what it leads to."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(folder / LOCK, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        handle = None
    if handle is None or not stat.S_ISREG(os.fstat(handle).st_mode):
        if handle is not None:
            os.close(handle)
        raise ConfigError(
            field, str(folder / LOCK), "must be a plain file, or not be there", "Remove it."
        )
    return handle


def _lock(folder: Path, field: str, work: str) -> int:
    while True:
        handle = _open_lock(folder, field)
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
