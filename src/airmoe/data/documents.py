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

import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from airmoe.errors import ConfigError, require
from airmoe.files import parse_json

_PIECE_BYTES = 1 << 13  # read or unpacked at once
WINDOW_BYTES = 1 << 27  # memory for unpacking .xz, as much as zstd takes


class _Pieces(io.RawIOBase):
    """A stream of pieces, of which none is longer than the buffer of its reader."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = filter(None, pieces)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        piece = next(self._pieces, b"")
        buffer[: len(piece)] = piece
        return len(piece)


def _unpack_xz(packed: IO[bytes]) -> Iterator[bytes]:
    """Unpack stream after stream, as `lzma.open` does, but with a limit on memory.

    Also, `lzma.open` takes bad data after a stream for the end of the file.
    """
    data = packed.read(_PIECE_BYTES)
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, WINDOW_BYTES)
        while not stream.eof:
            if stream.needs_input and not (data := data or packed.read(_PIECE_BYTES)):
                raise EOFError("the last stream has no end")
            yield stream.decompress(data, _PIECE_BYTES)
            data = b""
        data = stream.unused_data.lstrip(b"\0")  # there may be zeros between streams
        while not data and (piece := packed.read(_PIECE_BYTES)):
            data = piece.lstrip(b"\0")


def _open_xz(packed: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_Pieces(_unpack_xz(packed)), _PIECE_BYTES)


def _open_zst(packed: IO[bytes]) -> IO[bytes]:
    arrow = require("pyarrow", "to read .zst files")
    return io.BufferedReader(arrow.CompressedInputStream(packed, "zstd"))


# All unpack only as much as is asked for: memory stays small however far a file unpacks.
COMPRESSIONS: dict[str, Any] = {".gz": gzip.open, ".xz": _open_xz, ".zst": _open_zst}
ENDINGS = (
    *(kind + packed for kind in (".txt", ".jsonl") for packed in ("", *COMPRESSIONS)),
    ".parquet",
)

MAX_DOCUMENT_BYTES = 1 << 24
"""16 MiB of UTF-8, several of the longest books; also the longest line of a .jsonl file."""

MAX_COLUMN_BYTES = 1 << 29
"""512 MiB of text in one row group of a .parquet file, which is unpacked at once."""

_TITLE = re.compile(r" = [^=\s](?:.*[^=\s])? = \r?\n?")  # level 2 is ` = = Title = = `


@dataclass(frozen=True)
class Document:
    """One text."""

    text: str
    fraction: float | None = None
    """How much of the whole input has been read up to here; None if unknown."""


def read_files(files: list[Path], text_field: str) -> Iterator[Document | None]:
    """File after file; None for a row whose text is null."""
    sizes = [file.stat().st_size for file in files]
    total, before = max(sum(sizes), 1), 0
    for file, size in zip(files, sizes, strict=True):
        for text, fraction in _read(file, text_field):
            so_far = (before + fraction * size) / total
            yield None if text is None else Document(text, so_far)
        before += size


def corpus_error(place: object, rule: str, remedy: str) -> ConfigError:
    """Text that cannot be read, and where it is."""
    return ConfigError("corpus", str(place), rule, remedy)


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


def _read(path: Path, text_field: str) -> Iterator[tuple[str | None, float]]:
    """The texts of one file, None where a row has none, and how much of the file they are."""
    if path.suffix == ".parquet":
        yield from _read_parquet(path, text_field)
        return
    size = max(path.stat().st_size, 1)
    with path.open("rb") as packed:
        unpack = COMPRESSIONS.get(path.suffix)
        content = unpack(packed) if unpack else packed
        lines = _decoded_lines(content, path)
        if Path(path.stem if unpack else path).suffix == ".txt":
            texts: Iterator[str | None] = split_lines(lines, str(path), at_empty_lines=True)
        else:
            texts = _parse_jsonl(lines, path, text_field)
        try:
            for text in texts:
                yield text, packed.tell() / size
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            rule = f"is cut short or damaged near byte {packed.tell()} ({error})"
            remedy = "Fetch the file again, or unpack what can be read and use that."
            if "emory" in str(error):  # what zstd and xz say of a window over the limit
                rule = f"needs more than {WINDOW_BYTES >> 20} MiB of memory to unpack"
                remedy = "Pack it again with a smaller window, without --long or --ultra."
            raise corpus_error(path, rule, remedy) from error


def _decoded_lines(content: IO[bytes], path: Path) -> Iterator[str]:
    lines = iter(lambda: content.readline(MAX_DOCUMENT_BYTES + 1), b"")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_DOCUMENT_BYTES:
            raise _too_long(f"{path}, line {number}", "Break or remove the line.")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            remedy = "Convert the file, for example: iconv -f latin1 -t utf-8."
            rule = f"must be UTF-8, but byte {error.start + 1} of the line is not"
            raise corpus_error(f"{path}, line {number}", rule, remedy) from error


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
        if not isinstance(row, dict) or text_field not in row:
            raise _no_such_field(place, text_field, list(row) if isinstance(row, dict) else [])
        yield _checked(row[text_field], text_field, place)


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[str | None, float]]:
    parquet = require("pyarrow.parquet", "to read .parquet files")
    arrow = require("pyarrow", "to read .parquet files")
    row = 0
    try:
        # Opened here: pyarrow takes no name that is not UTF-8.
        with path.open("rb") as stream, parquet.ParquetFile(stream) as file:
            columns, total = file.schema_arrow.names, file.metadata.num_rows
            if text_field not in columns:
                raise _no_such_field(str(path), text_field, columns)
            kind = file.schema_arrow.field(text_field).type
            kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
            if kind not in (arrow.string(), arrow.large_string(), arrow.null()):
                raise _not_a_string(str(path), text_field, str(kind))
            _check_column_size(file.metadata, text_field, path)
            # Row by row: a packed file can repeat one long value at no cost.
            for batch in file.iter_batches(1, columns=[text_field]):
                row += 1
                [value] = batch.column(0).to_pylist()
                yield _checked(value, text_field, f"{path}, row {row}"), row / total
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read as parquet after row {row} ({error})"
        raise corpus_error(path, rule, "Fetch the file again, or write it again.") from error


def _check_column_size(metadata: Any, text_field: str, path: Path) -> None:
    """Raise if a row group, which is unpacked at once, holds too much text."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = map(group.column, range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field)
        if size > MAX_COLUMN_BYTES:
            rule = f"holds {size:,} bytes of text, must be at most {MAX_COLUMN_BYTES:,}"
            remedy = "Write the file again with smaller row groups (pyarrow: row_group_size=1000)."
            raise corpus_error(f"{path}, row group {number + 1}", rule, remedy)


def _checked(text: object, text_field: str, place: str) -> str | None:
    """The text of a row; None if it is null."""
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
        raise _too_long(place, "Divide it into several, or remove it.")
    return text


def _not_a_string(place: str, text_field: str, found: str) -> ConfigError:
    rule = f"must hold a string in '{text_field}', but holds {found}"
    return corpus_error(place, rule, "Fix or remove it, or set text_field to another one.")


def _too_long(place: str, remedy: str) -> ConfigError:
    rule = f"holds more than {MAX_DOCUMENT_BYTES:,} bytes in one document"
    return corpus_error(place, rule, remedy)


def _no_such_field(place: str, text_field: str, fields: list[str]) -> ConfigError:
    found = f"it has {', '.join(map(repr, fields))}" if fields else "it is not a JSON object"
    rule = f"has no field '{text_field}' ({found})"
    return corpus_error(place, rule, "Set text_field to the right one.")
