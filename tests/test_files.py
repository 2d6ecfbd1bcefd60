"""JSON from outside: read whole and as it is, or refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from airmoe import files
from airmoe.files import MOST_JSON_DIGITS, MOST_JSON_LEVELS, can_be_written, parse_json, read_json

VALUES = {"a": [1, -2.5, None, True, {"b": "ä\n"}], "c": {}, "long": 10**400}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_what_was_written_is_read(tmp_path: Path) -> None:
    files.write_json(tmp_path / "one.json", VALUES)
    assert read_json(tmp_path / "one.json") == VALUES
    assert parse_json(json.dumps(VALUES).encode()) == VALUES
    assert str(parse_json('{"loss": NaN, "norm": -Infinity}')) == "{'loss': nan, 'norm': -inf}"


def test_the_limits_are_where_they_are_said_to_be() -> None:
    assert parse_json("9" * MOST_JSON_DIGITS) == 10**MOST_JSON_DIGITS - 1
    assert parse_json(nested(MOST_JSON_LEVELS)) == json.loads(nested(MOST_JSON_LEVELS))
    objects = '{"a":' * MOST_JSON_LEVELS + "1" + "}" * MOST_JSON_LEVELS
    assert parse_json(objects) == json.loads(objects)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"a": 1', "delimiter"),
        (b'{"a": 1} x', "Extra data"),
        (b'"\xff"', "utf-8"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' twice"),
        (b"9" * (MOST_JSON_DIGITS + 1), "integer of more than 1,000 digits"),
        (b'{"a": [-' + b"9" * 5_000 + b"]}", "integer of more than 1,000 digits"),
        (nested(MOST_JSON_LEVELS + 1).encode(), "nested deeper than 64 levels"),
        (nested(100_000).encode(), "nested deeper than 64 levels"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64 levels"),
    ],
    ids=lambda part: str(part)[:20],
)
def test_what_is_no_json_of_ours_is_refused_in_one_line(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        read_json(tmp_path / "odd.json")
    assert "\n" not in str(caught.value)


def test_a_huge_file_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_JSON_BYTES", 100)
    (tmp_path / "huge.json").write_text(f'"{"x" * 98}"')
    assert read_json(tmp_path / "huge.json") == "x" * 98
    (tmp_path / "huge.json").write_text(f'"{"x" * 99}"')
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read_json(tmp_path / "huge.json")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero")):
        with pytest.raises(ValueError, match="regular file"):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


def test_text_that_no_file_or_path_can_hold() -> None:
    assert can_be_written("ä 中 😀\n\t\x1b")
    assert not any(map(can_be_written, ("a\0b", "\ud800", "\udfff", os.fsdecode(b"\xff"))))
