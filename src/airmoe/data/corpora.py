"""A corpus name or path -> splits of documents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from airmoe.data.documents import ENDINGS, Document, LocalFiles, kind_of, split_lines
from airmoe.data.optional import require
from airmoe.data.python_docs import PythonDocs
from airmoe.errors import ConfigError


class Source(Protocol):
    """Something that can be read from its start, any number of times, always in the same order."""

    def documents(self) -> Iterator[Document | None]:
        """Documents, and None for every row whose text is null."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Named text in splits: "train" always, "validation" and "test" only if official."""

    name: str
    sha256: str
    """Changes when the input changes: of a file's name and content, else of version or address."""
    former_sha256: str
    """What older versions had for it, and folders of theirs still have: names and sizes only."""
    splits: dict[str, Source]


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset of the Hugging Face Hub, streamed."""

    dataset: str
    config: str | None
    split: str
    text_field: str = "text"
    rows_are_lines: bool = False
    """WikiText: rows are lines, with "" for a line of one space, and articles span rows."""

    def documents(self) -> Iterator[Document | None]:
        if self.rows_are_lines:
            lines = (text if text and text.strip() else " \n" for text in self._texts())
            for text in split_lines(lines, self.dataset, at_empty_lines=False):
                if text.strip():
                    yield Document(text)
            return
        for text in self._texts():
            if text is None:
                yield None
            elif text.strip():
                yield Document(text)

    def _texts(self) -> Iterator[str | None]:
        load_dataset = require("datasets", f"to read {self.dataset}").load_dataset
        try:
            rows = load_dataset(self.dataset, self.config, split=self.split, streaming=True)
            for row in rows:
                yield row[self.text_field]
        except Exception as error:  # whatever a network can do
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(
                "corpus",
                self.dataset,
                f"could not be read from the Hugging Face Hub ({reason})",
                self._log_in()
                if _is_gated(error)
                else "Check the network and run again to go on, or give the path of a local copy.",
            ) from error

    def _log_in(self) -> str:
        return (
            f"Its owner asks who reads it: accept the terms on https://huggingface.co/datasets/"
            f"{self.dataset}, run `hf auth login`, and run again."
        )


def _is_gated(error: BaseException | None) -> bool:
    """Whether the Hub wants a login; `datasets` raises an error of its own because of that one."""
    while error is not None:
        if type(error).__name__ == "GatedRepoError":
            return True
        error = error.__cause__ or error.__context__
    return False


def _wikitext103() -> dict[str, HubSplit]:
    return {
        split: HubSplit("Salesforce/wikitext", "wikitext-103-raw-v1", split, rows_are_lines=True)
        for split in ("train", "validation", "test")
    }


def _hub_corpora() -> dict[str, dict[str, HubSplit]]:
    return {
        "wikitext103": _wikitext103(),
        # "eng": the English part of every crawl. Without a name the Hub gives all languages.
        "c5": {"train": HubSplit("BramVanroy/CommonCrawl-CreativeCommons", "eng", "train")},
        "openwebtext2": {"train": HubSplit("Geralt-Targaryen/openwebtext2", None, "train")},
    }


def open_corpus(name: str, text_field: str) -> Corpus:
    """Find a corpus by name or path; of files only the hash is taken yet."""
    hub = _hub_corpora()
    if name in hub:
        addresses = _sha256_of({split: f"{s.dataset}/{s.config}" for split, s in hub[name].items()})
        return Corpus(name, addresses, addresses, dict(hub[name]))
    if name == "python-docs":
        docs = PythonDocs()
        version = _sha256_of(docs.version)
        return Corpus(name, version, version, {"train": docs})
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            "corpus",
            name,
            f"must be python-docs, {', '.join(hub)}, or the path of a file or folder that exists",
            "Mind the spelling.",
        )
    return _open_path(path, text_field)


def _open_path(path: Path, text_field: str) -> Corpus:
    files = _files_of(path)
    splits = _official_splits(files, path) or {"train": files}
    root = path if path.is_dir() else path.parent
    listing = {
        split: [(file.relative_to(root).as_posix(), file.stat().st_size) for file in members]
        for split, members in splits.items()
    }
    # At every start: no slower than the check of the shards, and times can lie (cp -p, rsync -t).
    contents = {split: [_sha256_of_file(file) for file in splits[split]] for split in splits}
    return Corpus(
        path.resolve().name,
        _sha256_of([listing, contents]),
        _sha256_of(listing),
        {split: LocalFiles(tuple(members), text_field) for split, members in splits.items()},
    )


def _files_of(path: Path) -> list[Path]:
    """The readable files of a folder and its folders in sorted order, or the one file."""
    if path.is_dir():
        inside = sorted((file.relative_to(path).parts, file) for file in path.rglob("*"))
        visible = [file for parts, file in inside if not any(p.startswith(".") for p in parts)]
        files = [file for file in visible if kind_of(file) and not file.is_dir()]
    else:
        files = [path] if kind_of(path) else []
    if not files:
        raise ConfigError(
            "corpus",
            str(path),
            "holds no text to read" if path.is_dir() else "is not a kind of text file we read",
            f"Files must end in {', '.join(ENDINGS)}.",
        )
    for file in files:
        if not file.is_file():  # reading a pipe or device might never end
            raise ConfigError(
                "corpus",
                str(file),
                "must be a regular file or a link to one",
                "Put a file in its place, or remove it.",
            )
    return files


def _official_splits(files: list[Path], folder: Path) -> dict[str, list[Path]] | None:
    """Files named train*, valid* or val*, test*, where the first two exist; others are left out."""
    starts = {"train": ("train",), "validation": ("valid", "val"), "test": ("test",)}
    splits = {
        split: [file for file in files if file.name.lower().startswith(names)]
        for split, names in starts.items()
    }
    if not folder.is_dir() or not (splits["train"] and splits["validation"]):
        return None
    return {split: members for split, members in splits.items() if members}


def _sha256_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_of(identity: Any) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
