"""Texts as people read them: the name of a corpus, and what its test split is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Text:
    """A prepared text that is known by more than its folder."""

    title: str
    test: str | None = None  # what its test split is, where it has one of another text


WIKIPEDIA = "English Wikipedia 2015 extract"
# By the name of data.folder: data.corpus need not say where a prepared text came from.
KNOWN = {
    "wikipedia": Text(WIKIPEDIA, "WikiText-103's validation split"),
    "wikipedia-10m": Text(f"10 M tokens of the {WIKIPEDIA}"),
}


def known_text(data: dict[str, Any]) -> Text | None:
    """What is known of the text that these options of data name."""
    folder = data.get("folder")
    return KNOWN.get(Path(folder).name) if folder is not None else None


def corpus_title(data: dict[str, Any]) -> str:
    """The known name, or corpus and folder as they were given."""
    if (text := known_text(data)) is not None:
        return text.title
    corpus = Path(data["corpus"]).name
    if data["folder"] is not None:  # its text need not have come from data.corpus
        corpus += f" from {Path(data['folder']).name}"
    return corpus
