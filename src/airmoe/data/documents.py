"""Local text files -> documents, read one at a time; one over `MAX_DOCUMENT_BYTES` is refused.

| ending     | a document is |
|------------|---------------|
| `.txt`     | lines up to the next empty line, or an article of the WikiText format |
| `.jsonl`   | the text field of the JSON object on each line |
| `.parquet` | the text column of each row |

`.txt` and `.jsonl` may be compressed: `.gz`, `.xz`, `.zst`.

A line of spaces is not empty: WikiText puts ` \\n` between the paragraphs of an article and starts
the next article with a level-1 heading, ` = Title = `.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe.data.compression import COMPRESSIONS, OpenFile, corpus_error, open_bytes
from airmoe.errors import ConfigError, require
from airmoe.files import parse_json

ENDINGS = (
    *(kind + packed for kind in (".txt", ".jsonl") for packed in ("", *COMPRESSIONS)),
    ".parquet",
)

MAX_DOCUMENT_BYTES = 1 << 24
"""16 MiB of UTF-8, several of the longest books; also the longest line of a .jsonl file."""

MAX_ROW_GROUP_BYTES = 1 << 29
"""512 MiB of one column of a .parquet file, which is unpacked at once."""

DIVIDE = "Divide it into several, or remove it."

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

    def documents(self) -> Iterator[Document | None]:
        """Every document that is more than white space; None for a row whose text is null."""
        sizes = [file.stat().st_size for file in self.files]
        total, before = max(sum(sizes), 1), 0
        for file, size in zip(self.files, sizes, strict=True):
            for document in _read(file, self.text_field):
                if document is None:
                    yield None
                elif document.text.strip():
                    part = (document.fraction or 0.0) * size
                    yield Document(document.text, (before + part) / total)
            before += size


def kind_of(path: Path) -> str | None:
    """`.txt`, `.jsonl` or `.parquet`, whatever the compression; None for other files."""
    if not path.name.endswith(ENDINGS):
        return None
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def split_lines(lines: Iterable[str], place: str, *, at_empty_lines: bool) -> Iterator[str]:
    """Lines -> documents, which start at WikiText titles and, if asked, end at empty lines.

    A title counts only at the start or after a blank line, because formulas can look like one.
    """
    document: list[str] = []
    size, first = 0, 1  # bytes of the document, number of its first line
    after_blank = True
    for number, line in enumerate(lines, 1):
        ends = at_empty_lines and line in ("\n", "\r\n")
        if ends or (after_blank and _TITLE.fullmatch(line)):
            yield "".join(document).strip("\r\n")
            document.clear()
            size, first = 0, number + ends
        if not ends:
            document.append(line)
            size += len(line.encode())
            if size > MAX_DOCUMENT_BYTES:
                raise _too_long(f"{place}, from line {first}", "End documents by empty lines.")
        after_blank = not line.strip()
    yield "".join(document).strip("\r\n")


def _read(path: Path, text_field: str) -> Iterator[Document | None]:
    """Documents and null rows of one file; `fraction` is that of the file."""
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _read_parquet(path, text_field)
        return
    size = max(path.stat().st_size, 1)
    with open_bytes(path) as opened:
        lines = _decoded_lines(opened, path)
        if kind == ".txt":
            texts = split_lines(lines, str(path), at_empty_lines=True)
        else:
            texts = _parse_jsonl(lines, path, text_field)
        for text in texts:
            yield None if text is None else Document(text, opened.packed.tell() / size)


def _decoded_lines(opened: OpenFile, path: Path) -> Iterator[str]:
    offset = 0
    lines = iter(lambda: opened.content.readline(MAX_DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise _too_long(f"{path}, line {number}", "Break or remove the line.")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise corpus_error(
                f"{path}, line {number}",
                f"must be UTF-8, but byte {offset + error.start} of the text is not",
                "Convert the file, for example: iconv -f latin1 -t utf-8.",
            ) from error
        offset += len(line)


def _parse_jsonl(lines: Iterable[str], path: Path, text_field: str) -> Iterator[str | None]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            syntax = isinstance(error, json.JSONDecodeError)
            reason = f"{error.msg}, column {error.colno}" if syntax else str(error)
            rule = f"must be one JSON object ({reason})"
            raise corpus_error(place, rule, "Fix or remove the line.") from error
        yield _text_of(row, text_field, place)


def _read_parquet(path: Path, text_field: str) -> Iterator[Document | None]:
    parquet = require("pyarrow.parquet", "to read .parquet files")
    arrow = require("pyarrow", "to read .parquet files")
    try:
        # Opened here: pyarrow takes no name that is not UTF-8.
        with path.open("rb") as stream, parquet.ParquetFile(stream) as file:
            columns, total = file.schema_arrow.names, file.metadata.num_rows
            if text_field not in columns:
                raise _no_such_field(str(path), text_field, columns)
            kind = file.schema_arrow.types[columns.index(text_field)]
            if not _is_text(kind, arrow.types):
                raise _not_a_string(str(path), text_field, str(kind))
            _check_parquet_size(file.metadata, text_field, path)
            # Row by row: a packed file can repeat one long value at no cost.
            for row, batch in enumerate(file.iter_batches(1, columns=[text_field]), 1):
                value = batch.column(0)[0]
                text = _parquet_text(value, text_field, f"{path}, row {row}")
                yield None if text is None else Document(text, row / total)
    except (arrow.ArrowException, OSError) as error:
        rule = f"is not a whole parquet file ({error})"
        raise corpus_error(path, rule, "Fetch the file again.") from error


def _is_text(kind: Any, types: Any) -> bool:
    """Strings, also as a dictionary of them; or nothing but nulls."""
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)


def _check_parquet_size(metadata: Any, text_field: str, path: Path) -> None:
    """A row group is unpacked at once, so one that is too large is refused before that."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        texts = [column for column in columns if column.path_in_schema == text_field]
        size = max((text.total_uncompressed_size for text in texts), default=0)
        if size > MAX_ROW_GROUP_BYTES:
            raise corpus_error(
                f"{path}, row group {number + 1}",
                f"holds {size:,} bytes of text, must be at most {MAX_ROW_GROUP_BYTES:,}",
                "Write the file again with smaller row groups (pyarrow: row_group_size=1000).",
            )


def _parquet_text(value: Any, text_field: str, place: str) -> str | None:
    packed = getattr(value, "value", value)  # the value of a dictionary's entry
    if not packed.is_valid:
        return None
    if packed.as_buffer().size > MAX_DOCUMENT_BYTES:  # before there is a copy of it
        raise _too_long(place, DIVIDE)
    try:
        return _text_of({text_field: value.as_py()}, text_field, place)
    except UnicodeDecodeError as error:
        rule = f"must be UTF-8, but byte {error.start} of '{text_field}' is not"
        raise corpus_error(place, rule, "Fix or remove it.") from error


def _text_of(row: object, text_field: str, place: str) -> str | None:
    """The text of a JSON object or table row, checked; None if it is null."""
    if not isinstance(row, dict) or text_field not in row:
        raise _no_such_field(place, text_field, list(row) if isinstance(row, dict) else [])
    text = row[text_field]
    if text is None:
        return None
    if not isinstance(text, str):
        raise _not_a_string(place, text_field, type(text).__name__)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        rule = "must be Unicode text, but holds half of a surrogate pair"
        raise corpus_error(place, rule, "Fix or remove it.") from error
    if size > MAX_DOCUMENT_BYTES:
        raise _too_long(place, DIVIDE)
    return text


def _no_such_field(place: str, text_field: str, fields: list[str]) -> ConfigError:
    found = f"it has {', '.join(map(repr, fields))}" if fields else "it is not a JSON object"
    rule = f"has no field '{text_field}' ({found})"
    return corpus_error(place, rule, "Set text_field to the right one.")


def _not_a_string(place: str, text_field: str, found: str) -> ConfigError:
    rule = f"must hold a string in '{text_field}', but holds {found}"
    return corpus_error(place, rule, "Fix or remove it, or set text_field to another one.")


def _too_long(place: str, remedy: str) -> ConfigError:
    rule = f"holds more than {MAX_DOCUMENT_BYTES:,} bytes in one document"
    return corpus_error(place, rule, remedy)
