"""Local text files -> documents, one at a time: a file is never held whole.

| ending     | a document is |
|------------|---------------|
| `.txt`     | lines up to the next empty line, or an article of the WikiText format |
| `.jsonl`   | the text field of the JSON object on each line |
| `.parquet` | the text column of each row |

`.txt` and `.jsonl` may be compressed: `.gz`, `.xz`, `.zst`.

An empty line holds nothing at all. A line of spaces is not empty: WikiText puts ` \\n` between the
paragraphs of an article and starts the next article with a level-1 heading, ` = Title = `.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from airmoe.data.compression import COMPRESSIONS, OpenFile, open_bytes
from airmoe.data.optional import require
from airmoe.errors import ConfigError

ENDINGS = (
    *(kind + packed for kind in (".txt", ".jsonl") for packed in ("", *COMPRESSIONS)),
    ".parquet",
)

_TITLE = re.compile(r" = [^=\s](?:.*[^=\s])? = \r?\n?")  # level 2 is ` = = Title = = `
_PARQUET_ROWS = 256


@dataclass(frozen=True)
class Document:
    """One text, never blank."""

    text: str
    fraction: float | None = None
    """How much of the whole input has been read up to here; None where nobody can know."""


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
            for document in _read(file, self.text_field):
                if document.text.strip():
                    part = (document.fraction or 0.0) * size
                    yield Document(document.text, (before + part) / total)
            before += size


def kind_of(path: Path) -> str | None:
    """`.txt`, `.jsonl` or `.parquet`, whatever the compression; None for other files."""
    if not path.name.endswith(ENDINGS):
        return None
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def split_lines(lines: Iterable[str], *, at_empty_lines: bool) -> Iterator[str]:
    """Lines -> documents, which start at WikiText titles and, if asked, end at empty lines.

    A title counts only at the start or after a blank line, because formulas can look like one.
    """
    document: list[str] = []
    after_blank = True
    for line in lines:
        ends = at_empty_lines and line in ("\n", "\r\n")
        if ends or (after_blank and _TITLE.fullmatch(line)):
            yield "".join(document).strip("\r\n")
            document.clear()
        if not ends:
            document.append(line)
        after_blank = not line.strip()
    yield "".join(document).strip("\r\n")


def _read(path: Path, text_field: str) -> Iterator[Document]:
    """Documents of one file; `fraction` is that of the file."""
    kind = kind_of(path)
    if kind == ".parquet":
        yield from _read_parquet(path, text_field)
        return
    size = max(path.stat().st_size, 1)
    with open_bytes(path) as opened:
        lines = _decoded_lines(opened, path)
        if kind == ".txt":
            texts = split_lines(lines, at_empty_lines=True)
        else:
            texts = _parse_jsonl(lines, path, text_field)
        for text in texts:
            yield Document(text, opened.packed.tell() / size)


def _decoded_lines(opened: OpenFile, path: Path) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(opened.content, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                "corpus",
                f"{path}, line {number}",
                f"must be UTF-8, but byte {offset + error.start} of the text is not",
                "Convert the file, for example: iconv -f latin1 -t utf-8.",
            ) from error
        offset += len(line)


def _parse_jsonl(lines: Iterable[str], path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                "corpus",
                place,
                f"must be one JSON object ({error.msg}, column {error.colno})",
                "Mend or remove the line.",
            ) from error
        yield _text_of(row, text_field, place)


def _read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    parquet = require("pyarrow.parquet", "to read .parquet files")
    arrow = require("pyarrow", "to read .parquet files")
    try:
        with parquet.ParquetFile(path) as file:
            columns, total, row = file.schema_arrow.names, file.metadata.num_rows, 0
            if text_field not in columns:
                raise _no_such_field(str(path), text_field, columns)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    place = f"{path}, row {row}"
                    yield Document(_text_of({text_field: text}, text_field, place), row / total)
    except (arrow.ArrowInvalid, OSError) as error:
        raise ConfigError(
            "corpus", str(path), f"is not a whole parquet file ({error})", "Fetch the file again."
        ) from error


def _text_of(row: object, text_field: str, place: str) -> str:
    """The text of a JSON object or table row, checked."""
    if not isinstance(row, dict) or text_field not in row:
        raise _no_such_field(place, text_field, list(row) if isinstance(row, dict) else [])
    text = row[text_field]
    if not isinstance(text, str):
        raise ConfigError(
            "corpus",
            place,
            f"must hold a string in '{text_field}', but holds {type(text).__name__}",
            "Mend or remove it.",
        )
    if _has_lone_surrogate(text):
        raise ConfigError(
            "corpus",
            place,
            "must be Unicode text, but holds half of a surrogate pair",
            "Mend or remove it.",
        )
    return text


def _no_such_field(place: str, text_field: str, fields: list[str]) -> ConfigError:
    found = f"it has {', '.join(map(repr, fields))}" if fields else "it is not a JSON object"
    return ConfigError(
        "corpus",
        place,
        f"has no field '{text_field}' ({found})",
        "Set text_field to the right one.",
    )


def _has_lone_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
