"""JSON and bytes: written whole or not at all, and read or refused in one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

from airmoe import ConfigError
from airmoe.config import can_be_written
from airmoe.files import (
    build,
    check_unlocked,
    locked,
    parse_json,
    read_as,
    read_json,
    write_bytes,
    write_json,
)

VALUES = {"a": [1, -2.5, None, True, {"b": "ä\n"}], "c": {}, "long": 10**400}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "one.json", VALUES)
    assert read_json(tmp_path / "one.json") == VALUES
    assert str(parse_json('{"loss": NaN, "norm": -Infinity}')) == "{'loss': nan, 'norm': -inf}"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"a": 1',
        b'{"a": 1} x',
        b'"\xff"',
        b"9" * 5_000,
        b"[" * 100_000,
        b"[" * 65 + b"]" * 65,
    ],
    ids=lambda content: str(content[:9]),
)
def test_what_is_no_json_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        read_json(tmp_path / "odd.json")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(ValueError, match="regular file"):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


@dataclass(frozen=True)
class Part:
    count: int
    share: float = 1.0


class Whole(TypedDict):
    kind: Literal["a", "b"]
    parts: tuple[Part, ...]
    named: dict[str, int | None]


WHOLE = {"kind": "a", "parts": [{"count": 1, "share": 2}], "named": {"x": None}, "more": [0]}


def test_json_is_read_as_what_it_was(tmp_path: Path) -> None:
    write_json(tmp_path / "whole.json", WHOLE)
    read = read_as(Whole, tmp_path / "whole.json", "Remove it.")
    assert read == {**WHOLE, "parts": (Part(1, 2.0),)}
    assert type(read["parts"][0].share) is float
    assert build(Part, {"count": 1}) == Part(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "c"}, "kind is 'c'"),
        ({"parts": {}}, "parts is {}"),
        ({"parts": [{"count": True}]}, "count is True"),
        ({"parts": [{"count": 1.0}]}, "count is 1.0"),
        ({"parts": [{"share": 1.0}]}, "parts.0 lacks count"),
        ({"parts": [{"count": 1, "counts": 1}]}, "parts.0 has no field 'counts'"),
        ({"named": {"x": "1"}}, "named.x is '1'"),
    ],
)
def test_json_of_another_shape_names_what_differs(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "whole.json", WHOLE | change)
    with pytest.raises(ConfigError) as error:
        read_as(Whole, tmp_path / "whole.json", "Remove it.")
    assert f"whole.json', cannot be read ({reason}). Remove it." in str(error.value)


def test_text_that_no_file_or_path_can_hold() -> None:
    assert can_be_written("ä 中 😀\n\t\x1b")
    assert not any(map(can_be_written, ("a\0b", "\ud800", "\udfff", os.fsdecode(b"\xff"))))


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes(tmp_path / "file", b"before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(tmp_path / "file", b"after")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"before")]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    check_unlocked(tmp_path, "run", "is being trained")
    with locked(tmp_path, "run", "is being trained"):
        for attempt in (check_unlocked, lambda *what: locked(*what).__enter__()):
            with pytest.raises(ConfigError, match=rf"is being trained by process {os.getpid()} on"):
                attempt(tmp_path, "run", "is being trained")
    check_unlocked(tmp_path, "run", "is being trained")


@pytest.mark.parametrize(
    "make",
    [lambda lock: lock.symlink_to("precious"), os.mkfifo, Path.mkdir],
    ids=["link", "pipe", "folder"],
)
def test_a_lock_that_is_no_plain_file(make: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    make(tmp_path / "lock")
    with pytest.raises(OSError, match=r"lock'$"), locked(tmp_path, "run", "is being trained"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
