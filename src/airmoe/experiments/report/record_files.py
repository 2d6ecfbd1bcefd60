"""What all files of a folder of records keep to: each lies in a folder inside it, and none takes
the place of something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeVar

from airmoe.errors import ConfigError

Kept = TypeVar("Kept")


def is_name(text: str) -> bool:
    """Whether a folder can be called so: what a file from elsewhere says may lead anywhere."""
    return text not in ("", "..") and text == PurePosixPath(text).name


def check_name(name: str, reason: str, remedy: str) -> None:
    """Of the folder that a file will lie in."""
    if not is_name(name):
        raise ConfigError("records", name, f"must be a name, because {reason}", remedy)


def cannot_take(path: Path, title: str, rule: str, remedy: str) -> ConfigError:
    """The file of `title` is another's; to be raised before anything is written."""
    return ConfigError("records", str(path), f"cannot take {title}: {rule}", remedy)


def write_files(planned: Mapping[Path, Kept], write: Callable[[Kept, Path], None]) -> None:
    """Those that are there already are replaced."""
    for path, kept in planned.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(kept, path)
