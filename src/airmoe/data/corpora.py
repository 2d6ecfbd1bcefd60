"""A corpus name or path -> splits of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from airmoe.data.documents import ENDINGS, Document, LocalFiles, corpus_error, split_lines
from airmoe.data.python_docs import PythonDocs
from airmoe.errors import require
from airmoe.files import file_sha256, json_sha256


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
    """Changes when the input changes: of files' names and contents, else of version or address."""
    splits: dict[str, Source]


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset of the Hugging Face Hub, streamed."""

    dataset: str
    config: str | None
    split: str
    rows_are_lines: bool = False
    """WikiText: rows are lines, with "" for a line of one space, and articles span rows."""

    def documents(self) -> Iterator[Document | None]:
        texts: Iterator[str | None] = self._texts()
        if self.rows_are_lines:
            lines = (text if text and text.strip() else " \n" for text in texts)
            texts = split_lines(lines, self.dataset, at_empty_lines=False)
        for text in texts:
            if text is None:
                yield None
            elif text.strip():
                yield Document(text)

    def _texts(self) -> Iterator[str | None]:
        load_dataset = require("datasets", f"to read {self.dataset}").load_dataset
        try:
            rows = load_dataset(self.dataset, self.config, split=self.split, streaming=True)
            for row in rows:
                yield row["text"]
        except Exception as error:  # whatever a network can do
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            remedy = "Check the network and run again to go on, or give the path of a local copy."
            if "gated" in str(error):
                remedy = (
                    "Its owner asks who reads it: accept the terms on https://huggingface.co/"
                    f"datasets/{self.dataset}, run `hf auth login`, and run again."
                )
            rule = f"could not be read from the Hugging Face Hub ({reason})"
            raise corpus_error(self.dataset, rule, remedy) from error


# "eng": the English part of every crawl. Without a name the Hub gives all languages.
_HUB_CORPORA = {
    "wikitext103": {
        split: HubSplit("Salesforce/wikitext", "wikitext-103-raw-v1", split, rows_are_lines=True)
        for split in ("train", "validation", "test")
    },
    "c5": {"train": HubSplit("BramVanroy/CommonCrawl-CreativeCommons", "eng", "train")},
    "openwebtext2": {"train": HubSplit("Geralt-Targaryen/openwebtext2", None, "train")},
}


def open_corpus(name: str, text_field: str) -> Corpus:
    """Find a corpus by name or path; files are only hashed yet."""
    if name in _HUB_CORPORA:
        splits = _HUB_CORPORA[name]
        addresses = {split: f"{s.dataset}/{s.config}" for split, s in splits.items()}
        return Corpus(name, json_sha256(addresses), dict(splits))
    if name == "python-docs":
        docs = PythonDocs()
        return Corpus(name, json_sha256(docs.version), {"train": docs})
    path = Path(name)
    if not path.exists():
        known = ", ".join(("python-docs", *_HUB_CORPORA))
        rule = f"must be {known}, or the path of a file or folder that exists"
        raise corpus_error(name, rule, "Check the spelling.")
    files = _files_of(path)
    members = _official_splits(files, path) or {"train": files}
    root = path if path.is_dir() else path.parent
    listing = {
        split: [(file.relative_to(root).as_posix(), file.stat().st_size) for file in found]
        for split, found in members.items()
    }
    # At every start: as fast as checking the shards, and times can lie (cp -p, rsync -t).
    contents = {split: [file_sha256(file) for file in members[split]] for split in members}
    return Corpus(
        path.resolve().name,
        json_sha256([listing, contents]),
        {split: LocalFiles(tuple(found), text_field) for split, found in members.items()},
    )


def _files_of(path: Path) -> list[Path]:
    """The readable files of a folder and its folders in sorted order, or the one file."""
    inside = [path]
    if path.is_dir():
        found = sorted((file.relative_to(path).parts, file) for file in path.rglob("*"))
        inside = [file for parts, file in found if not any(p.startswith(".") for p in parts)]
    files = [file for file in inside if file.name.endswith(ENDINGS) and not file.is_dir()]
    if not files:
        rule = "holds no text to read" if path.is_dir() else "is not a kind of text file we read"
        raise corpus_error(path, rule, f"Files must end in {', '.join(ENDINGS)}.")
    for file in files:
        if not file.is_file():  # reading a pipe or device might never end
            rule = "must be a regular file or a link to one"
            raise corpus_error(file, rule, "Put a file in its place, or remove it.")
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
