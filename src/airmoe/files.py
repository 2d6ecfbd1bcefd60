"""Writing that survives a kill: whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any


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
    """Whether that is why a write failed; a used-up quota is a full disk to whoever has it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


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
