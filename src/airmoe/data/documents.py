"""Local text files -> documents, read one at a time.

| ending     | a document is |
|------------|---------------|
| `.txt`     | lines up to the next empty line, or an article of the WikiText format |
| `.jsonl`   | the text field of the JSON object on each line |
| `.parquet` | the text column of each row |

`.txt` and `.jsonl` may be compressed: `.gz`, `.xz`.

A line of spaces is not empty: WikiText puts ` \\n` between the paragraphs of an article and starts
the next article with a level-1 heading, ` = Title = `.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from airmoe.errors import ConfigError, require

COMPRESSIONS = {".gz": gzip.open, ".xz": lzma.open}
ENDINGS = (
    *(kind + packed for kind in (".txt", ".jsonl") for packed in ("", *COMPRESSIONS)),
    ".parquet",
)

MAX_CHARACTERS = 1 << 24
"""Of a document in a .txt file, several of the longest books: more is a file without empty lines,
which would be held in memory whole."""

_PARQUET_ROWS = 1024  # read at once

_TITLE = re.compile(r" = [^=\s](?:.*[^=\s])? = \r?\n?")  # level 2 is ` = = Title = = `


@dataclass(frozen=True)
class Document:
    """One text, never blank."""

    text: str
    fraction: float | None = None
    """How much of the whole input has been read up to here; None if unknown."""


@dataclass(frozen=True)
class LocalFiles:
    """The documents of some files, file after file."""

    files: tuple[Path, ...]
    text_field: str

    def documents(self) -> Iterator[Document]:
        """Every document that is more than white space."""
        sizes = [file.stat().st_size for file in self.files]
        total, before = max(sum(sizes), 1), 0
        for file, size in zip(self.files, sizes, strict=True):
            for text, fraction in _read(file, self.text_field):
                if text and text.strip():
                    yield Document(text, (before + fraction * size) / total)
            before += size


def corpus_error(place: object, rule: str, remedy: str) -> ConfigError:
    """Text that cannot be read, and where it is."""
    return ConfigError("corpus", str(place), rule, remedy)


def split_lines(lines: Iterable[str], place: str, *, at_empty_lines: bool) -> Iterator[str]:
    """Lines -> documents, which start at WikiText titles and, if asked, end at empty lines.

    A title counts only at the start or after a blank line, because formulas can look like one.
    """
    document: list[str] = []
    size, first = 0, 1  # characters of the document, number of its first line
    after_blank = True
    for number, line in enumerate(lines, 1):
        ends = at_empty_lines and line in ("\n", "\r\n")
        if ends or (after_blank and _TITLE.fullmatch(line)):
            yield "".join(document).strip("\r\n")
            document.clear()
            size, first = 0, number + ends
        if not ends:
            document.append(line)
            size += len(line)
            if size > MAX_CHARACTERS:
                rule = f"holds more than {MAX_CHARACTERS:,} characters in one document"
                remedy = "End documents by empty lines."
                raise corpus_error(f"{place}, from line {first}", rule, remedy)
        after_blank = not line.strip()
    yield "".join(document).strip("\r\n")


def _read(path: Path, text_field: str) -> Iterator[tuple[str | None, float]]:
    """The texts of one file, None where a row has none, and how much of the file they are."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path, text_field)
        return
    size = max(path.stat().st_size, 1)
    with path.open("rb") as packed:
        unpack = COMPRESSIONS.get(path.suffix)
        lines = _decoded_lines(unpack(packed) if unpack else packed, path)
        if Path(path.stem if unpack else path).suffix == ".txt":
            texts: Iterator[str | None] = split_lines(lines, str(path), at_empty_lines=True)
        else:
            texts = _parse_jsonl(lines, path, text_field)
        try:
            for text in texts:
                yield text, packed.tell() / size
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            rule = f"is cut short or damaged near byte {packed.tell()} ({error})"
            remedy = "Fetch the file again, or unpack what can be read and use that."
            raise corpus_error(path, rule, remedy) from error


def _decoded_lines(content: IO[bytes], path: Path) -> Iterator[str]:
    for number, line in enumerate(content, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            remedy = "Convert the file, for example: iconv -f latin1 -t utf-8."
            raise corpus_error(f"{path}, line {number}", "must be UTF-8", remedy) from error


def _parse_jsonl(lines: Iterable[str], path: Path, text_field: str) -> Iterator[str | None]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            rule = f"must be one JSON object ({error.msg}, column {error.colno})"
            raise corpus_error(place, rule, "Fix or remove the line.") from error
        if not isinstance(row, dict) or text_field not in row:
            raise _no_such_field(place, text_field, list(row) if isinstance(row, dict) else [])
        yield _checked(row[text_field], text_field, place)


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[str | None, float]]:
    parquet = require("pyarrow.parquet", "to read .parquet files")
    arrow = require("pyarrow", "to read .parquet files")
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns, total = file.schema_arrow.names, file.metadata.num_rows
            if text_field not in columns:
                raise _no_such_field(str(path), text_field, columns)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(value, text_field, f"{path}, row {row}"), row / total
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read as parquet after row {row} ({error})"
        raise corpus_error(path, rule, "Fetch the file again, or write it anew.") from error


def _checked(text: object, text_field: str, place: str) -> str | None:
    """The text of a row; None if it is null."""
    if text is None:
        return None
    if not isinstance(text, str):
        rule = f"must hold a string in '{text_field}', but holds {type(text).__name__}"
        raise corpus_error(place, rule, "Fix or remove it, or set text_field to another one.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        rule = "must be Unicode text, but holds half of a surrogate pair"
        raise corpus_error(place, rule, "Fix or remove it.") from error
    return text


def _no_such_field(place: str, text_field: str, fields: list[str]) -> ConfigError:
    found = f"it has {', '.join(map(repr, fields))}" if fields else "it is not a JSON object"
    rule = f"has no field '{text_field}' ({found})"
    return corpus_error(place, rule, "Set text_field to the right one.")
