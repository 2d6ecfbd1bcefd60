"""JSON and bytes: written whole or not at all, and read or refused in one line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from airmoe import ConfigError
from airmoe.files import check_unlocked, locked, parse_json, read_json, write_bytes, write_json

VALUES = {"a": [1, -2.5, None, True, {"b": "ä\n"}], "c": {}, "long": 10**400}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "one.json", VALUES)
    assert read_json(tmp_path / "one.json") == VALUES
    assert str(parse_json('{"loss": NaN, "norm": -Infinity}')) == "{'loss': nan, 'norm': -inf}"


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b'{"a": 1} x', b'"\xff"', b"[" * 100_000])
def test_what_is_no_json_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        read_json(tmp_path / "odd.json")


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
