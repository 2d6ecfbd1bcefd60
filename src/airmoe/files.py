"""Files: written whole or not at all, read with their types checked, locked, hashed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import reprlib
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints, is_typeddict

from airmoe.errors import ConfigError

LOCK = "lock"  # file in a locked folder; never replaced
Kind = TypeVar("Kind")
MOST_JSON_LEVELS = 64  # lists and objects in each other; many more would end in a RecursionError


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
        draft.unlink(missing_ok=True)  # it wastes space, and a new run wants an empty folder
        raise
    sync_folder(path.parent)


def disk_is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, or the quota, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def read_json(path: Path) -> Any:
    """The JSON of a file; anything wrong with it is a ValueError of one line."""
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would make us wait
        raise ValueError("it is not a regular file")
    return parse_json(path.read_bytes())


def parse_json(text: str | bytes) -> Any:
    """Anything wrong with the text is a ValueError of one line."""
    try:
        values = json.loads(text)
        _check_levels(values, MOST_JSON_LEVELS)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return values


def _check_levels(values: Any, left: int) -> None:
    if isinstance(values, dict | list):
        if not left:
            raise RecursionError
        for one in values.values() if isinstance(values, dict) else values:
            _check_levels(one, left - 1)


def read_as(
    kind: type[Kind],
    path: Path,
    remedy: str,
    *,
    field: str = "file",
    check: Callable[[Any], object] = bool,
) -> Kind:
    """A JSON file that airmoe wrote, as the dataclass or TypedDict it was; else a `ConfigError`.

    `check` sees its values first, to refuse another format in words of its own.
    """
    try:
        values = read_json(path)
        check(values)
        return build(kind, values)
    except ConfigError:
        raise
    except (OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(field, str(path), f"cannot be read ({reason})", remedy) from error


def build(kind: Any, value: Any, name: str = "it") -> Any:
    """Plain JSON as a type: the inverse of `asdict`. A ValueError names what does not fit.

    A dataclass has its fields and no others; a TypedDict may have more than its own.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or type(value) is kind or (origin is Literal and value in parts):
        return value
    if origin is UnionType:
        for part in parts:
            with suppress(ValueError):
                return build(part, value, name)
    elif origin is dict and isinstance(value, dict):
        return {key: build(parts[1], one, f"{name}.{key}") for key, one in value.items()}
    elif origin in (list, tuple) and isinstance(value, list):
        return origin(build(parts[0], one, f"{name}.{place}") for place, one in enumerate(value))
    elif isinstance(value, dict) and (is_dataclass(kind) or is_typeddict(kind)):
        return _build_record(kind, value, name)
    elif kind is float and type(value) is int:
        return float(value)
    raise ValueError(f"{name} is {reprlib.repr(value)}")


def _build_record(kind: Any, values: dict[str, Any], name: str) -> Any:
    hints = get_type_hints(kind)
    needed = {one for one in hints if not hasattr(kind, one)}  # a default is a class attribute
    if missing := sorted(needed - values.keys()):
        raise ValueError(f"{name} lacks {missing[0]}")
    found = {one: build(hints.get(one, Any), value, one) for one, value in values.items()}
    if is_typeddict(kind):
        return found
    if extra := found.keys() - hints.keys():
        raise ValueError(f"{name} has no field {sorted(extra)[0]!r}")
    return kind(**found)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(values: Any) -> str:
    """The hash of plain values; the order of keys does not matter."""
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
        # Not through a link, because what it leads to would be overwritten.
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(folder / LOCK))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 1000, 0).decode(errors="replace").strip()
            os.close(handle)
            rule = f"{work} by {holder or 'another process'} at this moment"
            raise ConfigError(field, str(folder), rule, "Wait for it, or stop it first.") from error
        try:
            if os.path.samestat(os.fstat(handle), os.stat(folder / LOCK)):
                return handle
        except FileNotFoundError:
            pass  # the last holder removed the file before we locked it
        os.close(handle)


class KeptStream:
    """A stream that outlives its reader: `airmoe train tiny | head -1` trains to the end."""

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
            with suppress(OSError):  # it may have no file descriptor
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def sync_tree(folder: Path) -> None:
    """Flush every file of a folder, and the folder itself, to the disk."""
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
    """Let this process go on when nobody reads its output any more, or nobody ever did."""
    sys.stdout, sys.stderr = (
        cast(Any, KeptStream(stream or open(os.devnull, "w")))  # noqa: SIM115
        for stream in (sys.stdout, sys.stderr)
    )
