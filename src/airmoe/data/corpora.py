"""A corpus name or path -> splits of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from airmoe.data.documents import ENDINGS, Document, corpus_error, read_files, split_lines
from airmoe.data.python_docs import python_version, read_python_docs
from airmoe.errors import require
from airmoe.files import file_sha256, json_sha256

Source = Callable[[], Iterator[Document | None]]
"""Reads text from its start, in the same order at every call; None is a row whose text is null."""

# Name -> dataset, configuration, splits. "eng" is the English part of every crawl; without a name
# the Hub gives all languages.
_HUB_CORPORA = {
    "wikitext103": ("Salesforce/wikitext", "wikitext-103-raw-v1", ("train", "validation", "test")),
    "c5": ("BramVanroy/CommonCrawl-CreativeCommons", "eng", ("train",)),
    "openwebtext2": ("Geralt-Targaryen/openwebtext2", None, ("train",)),
}


@dataclass(frozen=True)
class Corpus:
    """Named text in splits: "train" always, "validation" and "test" only if official."""

    name: str
    sha256: str
    """Changes when the input changes: of files' names and contents, else of version or address."""
    splits: dict[str, Source]

    def read(self, split: str) -> Iterator[Document | None]:
        """The documents of a split that are more than white space; None for a row without text."""
        return (one for one in self.splits[split]() if one is None or one.text.strip())


def open_corpus(name: str, text_field: str) -> Corpus:
    """Find a corpus by name or path; files are only hashed yet."""
    if name in _HUB_CORPORA:
        dataset, config, splits = _HUB_CORPORA[name]
        addresses = dict.fromkeys(splits, f"{dataset}/{config}")
        sources = {split: partial(_read_hub, dataset, config, split) for split in splits}
        return Corpus(name, json_sha256(addresses), sources)
    if name == "python-docs":
        return Corpus(name, json_sha256(python_version()), {"train": read_python_docs})
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
        {split: partial(read_files, found, text_field) for split, found in members.items()},
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


def _read_hub(dataset: str, config: str | None, split: str) -> Iterator[Document | None]:
    """One split of a dataset of the Hugging Face Hub, streamed: a document per row.

    Rows of WikiText are lines, articles span many; "" means a line of one space.
    """
    texts = _rows(dataset, config, split)
    if dataset == "Salesforce/wikitext":
        lines = (text if text and text.strip() else " \n" for text in texts)
        texts = split_lines(lines, dataset, at_empty_lines=False)
    return (None if text is None else Document(text) for text in texts)


def _rows(dataset: str, config: str | None, split: str) -> Iterator[str | None]:
    load_dataset = require("datasets", f"to read {dataset}").load_dataset
    try:
        for row in load_dataset(dataset, config, split=split, streaming=True):
            yield row["text"]
    except Exception as error:  # whatever a network can do
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        remedy = "Check the network and run again to go on, or give the path of a local copy."
        if "gated" in str(error):
            remedy = (
                "Its owner asks who reads it: accept the terms on https://huggingface.co/"
                f"datasets/{dataset}, run `hf auth login`, and run again."
            )
        rule = f"could not be read from the Hugging Face Hub ({reason})"
        raise corpus_error(dataset, rule, remedy) from error
