"""Local files -> documents: what separates them, and what is refused."""

from __future__ import annotations

import gzip
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airmoe import ConfigError
from airmoe.data import documents as documents_module
from airmoe.data.corpora import open_corpus
from airmoe.data.documents import read_files, split_lines
from tests.data.common import refused, write_jsonl

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pytest.importorskip("pyarrow").compress(content, "zstd", asbytes=True),
}


def read(path: Path, text_field: str = "text") -> list[str]:
    """Its texts; "" stands for a row without one, which no document can be."""
    return [d.text if d else "" for d in open_corpus(str(path), text_field).read("train")]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        ("one\ntwo\n\nthree", ["one\ntwo", "three"]),
        ("\n\none\n\n\n\ntwo\n\n", ["one", "two"]),
        ("one\r\n\r\ntwo\r\n", ["one", "two"]),
        ("one\n \ntwo\n", ["one\n \ntwo"]),  # a line of one space is not empty
        ("\ufeffone\n", ["one"]),
        ("", []),
        (" \n\t\n\n \n", []),
        (" \n = First = \n \n text \n \n = = Part = = \n \n more \n \n = Second = \n \n end \n",
         [" = First = \n \n text \n \n = = Part = = \n \n more \n ", " = Second = \n \n end "]),
        ("a \n = b = \nc\n", ["a \n = b = \nc"]),  # a formula: no blank line before it
    ],
)  # fmt: skip
def test_text_files_end_documents_at_empty_lines_and_wikitext_titles(
    tmp_path: Path, content: str, documents: list[str]
) -> None:
    assert read(write(tmp_path / "a.txt", content)) == documents


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1)))
def test_split_lines_undoes_joining_with_empty_lines(texts: list[str]) -> None:
    lines = "\n\n".join(texts).split("\n")
    found = split_lines((line + "\n" for line in lines), "a.txt", at_empty_lines=True)
    assert [text for text in found if text] == texts


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_files_hold_the_same_documents(tmp_path: Path, ending: str) -> None:
    texts = [f"document {number} über 東京\nsecond line" for number in range(5000)]
    packed = PACKERS[ending]("\n\n".join(texts).encode())
    path = write(tmp_path / f"a.txt{ending}", packed)
    documents = [d for d in read_files([path], "text") if d is not None]
    assert [document.text for document in documents] == texts
    fractions = [document.fraction or 0.0 for document in documents]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and fractions[0] > 0


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_frames_follow_each_other_and_all_must_be_whole(tmp_path: Path, ending: str) -> None:
    pack, path = PACKERS[ending], tmp_path / f"a.txt{ending}"
    assert read(write(path, pack(b"one\n\ntw") + pack(b"o\n"))) == ["one", "two"]
    packed = pack("\n\n".join(str(number * 7919 % 10007) for number in range(50_000)).encode())
    for kept in (0.5, 0.999):
        write(path, packed[: int(len(packed) * kept)])
        with refused(f"a.txt{ending}", "cut short or damaged near byte", "Fetch"):
            read(path)
    with refused("cut short or damaged"):
        read(write(path, "plain text, wrong name"))


def test_zeros_are_allowed_after_xz_streams_only(tmp_path: Path) -> None:
    one, two = lzma.compress(b"one\n\n"), lzma.compress(b"two")
    assert read(write(tmp_path / "a.txt.xz", one + bytes(600) + two + bytes(4))) == ["one", "two"]
    zstd = PACKERS[".zst"](b"one")
    for name, content in (
        ("a.txt.xz", bytes(600)),
        ("b.txt.xz", one + b"\1"),
        ("a.txt.zst", bytes(600)),
        ("b.txt.zst", zstd + bytes(4)),
    ):
        with pytest.raises(ConfigError, match="cut short or damaged"):
            read(write(tmp_path / name, content))


def test_invalid_utf8_names_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"caf\xc3\xa9\nna\xefve\n")
    with refused("a.txt, line 2", "byte 3 of the line", "UTF-8", "iconv"):
        read(path)


def test_jsonl_takes_the_field_and_skips_blank_texts(tmp_path: Path) -> None:
    rows = '{"body": "one\\n\\ntwo"}\n\n{"body": " "}\n{"body": null}\n{"body": "3"}'
    assert read(write(tmp_path / "a.jsonl", rows), "body") == ["one\n\ntwo", "", "3"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{not json", "must be one JSON object"),
        ('["text"]', "has no field 'text' (it is not a JSON object)"),
        ('{"body": "x"}', "has no field 'text' (it has 'body')"),
        ('{"text": 3}', "must hold a string in 'text', but holds int"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ('{"text": "x", "n": ' + "9" * 4301 + "}", "JSON object (Exceeds the limit (4300 digits)"),
        ("[" * 100_000, "must be one JSON object (it is nested too deeply"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, part: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "good"}}\n{line}\n')
    with refused("a.jsonl, line 2", part):
        read(path)


def write_table(columns: dict[str, Any], path: Path) -> Path:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table(columns), path, row_group_size=300)
    return path


def test_parquet_takes_the_column(tmp_path: Path) -> None:
    texts = [f"row {number}" for number in range(1000)]
    path = write_table({"id": list(range(1000)), "body": texts}, tmp_path / "a.parquet")
    assert read(path, "body") == texts
    with refused("a.parquet", "has no field 'text' (it has 'id', 'body')"):
        read(path, "text")


def test_a_bad_parquet_file_or_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        read(write(tmp_path / "a.parquet", b"PAR1 and no more"))
    path = tmp_path / "b.parquet"
    pyarrow = pytest.importorskip("pyarrow")
    binary = pyarrow.array([b"good", b"caf\xe9"], pyarrow.binary())
    for column, rule in (
        (binary, "', must hold a string in 'text', but holds binary"),
        (binary.view(pyarrow.string()), "', cannot be read as parquet after row 2 ('utf-8' codec"),
    ):
        write_table({"text": column}, path)
        with refused(f"b.parquet{rule}"):
            read(path)


def test_parquet_kinds_of_strings(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    texts, path = ["one", None, " ", "two", "one"], tmp_path / "a.parquet"
    plain = pyarrow.array(texts)
    for column in (plain, plain.cast("large_string"), plain.dictionary_encode()):
        write_table({"text": column}, path)
        assert read(path) == ["one", "", "two", "one"], column.type
    write_table({"text": pyarrow.nulls(2)}, path)
    assert read(path) == ["", ""]


@pytest.mark.parametrize("ending", PACKERS)
def test_a_document_over_the_limit_is_refused_with_its_place(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT_BYTES", 1000)

    def expect(name: str, content: str, *parts: str) -> None:
        path = write(tmp_path / (name + ending), PACKERS[ending](content.encode()))
        if not parts:
            assert len(read(path)) == 2
            return
        with refused(*parts, "more than 1,000 bytes in one document"):
            read(path)

    expect("a.txt", "short\n\n" + "é" * 500)
    expect("a.txt", "short\n\n" + "é" * 501, f"a.txt{ending}, line 3")
    expect("a.txt", "short\n\n" + "é\n" * 334, f"a.txt{ending}, from line 3")
    expect("a.txt", "é\n" * 333 + "\n = Title =\n" + "é\n" * 329)
    row = '{"text": "short"}\n{"text": "%s"}'
    expect("a.jsonl", row % ("x" * 988))
    expect("a.jsonl", row % ("x" * 989), f"a.jsonl{ending}, line 2")


def test_a_parquet_row_over_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT_BYTES", 1000)
    write_table({"text": ["é" * 500, "é" * 501]}, tmp_path / "a.parquet")
    with refused("a.parquet, row 2", "more than 1,000 bytes in one document"):
        read(tmp_path / "a.parquet")


READ_BOMBS = """
import resource, sys
from pathlib import Path
import airmoe.data.documents as documents
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[1:]:
    try:
        for _ in documents.read_files([Path(name)], "text"): pass
    except documents.ConfigError as error:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


def assert_refused_in_little_memory(bombs: dict[Path, str], most_megabytes: int) -> None:
    """Each file is refused with its message by a process that stays small."""
    command = [sys.executable, "-c", READ_BOMBS, *bombs]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for rule, answer in zip(bombs.values(), done.stdout.splitlines(), strict=True):
        kilobytes, _, message = answer.partition(" ")
        assert rule in message
        assert int(kilobytes) < most_megabytes << 10, rule


@pytest.mark.slow
def test_bombs_take_little_memory(tmp_path: Path) -> None:
    """A gigabyte in one line, of zstd in one frame: each of its packed bytes is 32 kB of text."""
    zeros, bombs = b"0" * (1 << 24), {}
    for name in ("a.txt.zst", "a.txt.xz", "a.jsonl.gz"):
        pack = PACKERS[Path(name).suffix]
        packed = pack(zeros * 64) if name == "a.txt.zst" else pack(zeros) * 64
        assert len(packed) < 2 << 20
        path = write(tmp_path / name, packed)
        bombs[path] = f"{path}, line 1', holds more than 16,777,216 bytes"
    assert_refused_in_little_memory(bombs, 150)


@pytest.mark.slow
def test_parquet_bombs_take_little_memory(tmp_path: Path) -> None:
    """A list of 20 million numbers, 20 MB of text ten times over: each in a few kB."""
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    zeros = pyarrow.repeat(pyarrow.scalar(0, pyarrow.int8()), 20_000_000)
    numbers = pyarrow.ListArray.from_arrays(pyarrow.array([0, len(zeros)], "int32"), zeros)
    long = pyarrow.DictionaryArray.from_arrays([0] * 10, ["a " * 10_000_000])
    bombs = {}
    for name, column, kind, rule in (
        ("list", numbers, numbers.type, "holds list<"),
        ("dictionary", long, long.type, "row 1', holds more"),
        ("strings", long, pyarrow.string(), "row 1', holds more"),
    ):
        path = tmp_path / f"{name}.parquet"
        schema = pyarrow.schema([("text", kind)])
        with parquet.ParquetWriter(
            path, schema, compression="zstd", dictionary_pagesize_limit=1 << 30
        ) as file:
            file.write_table(pyarrow.table({"text": column.cast(kind)}))
        assert path.stat().st_size < 25_000
        bombs[path] = rule
    assert_refused_in_little_memory(bombs, 200)  # one value unpacked, decoded, in its row


def test_a_window_over_the_limit_is_refused(tmp_path: Path) -> None:
    # A frame whose header asks for 2^28 bytes, with one block of "text".
    zstd = b"\x28\xb5\x2f\xfd\x00\x90" + bytes([4 << 3 | 1, 0, 0]) + b"text"
    for name, content in (
        ("a.txt.zst", zstd),
        (
            "a.txt.xz",
            lzma.compress(b"text", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 28}]),
        ),
    ):
        with refused(name, "needs more than 128 MiB of memory to unpack"):
            read(write(tmp_path / name, content))


def test_the_fraction_spans_all_files(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "a.jsonl", ["x"])
    large = write_jsonl(tmp_path / "b.jsonl", ["y" * small.stat().st_size * 3])
    total = small.stat().st_size + large.stat().st_size
    fractions = [d and d.fraction for d in read_files([small, large], "text")]
    assert fractions == [small.stat().st_size / total, 1.0]


def test_a_missing_package_is_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name in ("a.txt.zst", "a.parquet"):
        with refused("pyarrow", "pip install 'airmoe[data]'"):
            read(write(tmp_path / name, b"x"))
