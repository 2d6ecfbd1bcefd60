"""Texts as people read them: the name of a corpus, and what its test split is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from airmoe.experiments.recall_study.record import RecallStudy
from airmoe.experiments.report.record import Run


@dataclass(frozen=True)
class Text:
    """A prepared text that is known by more than its folder."""

    title: str
    test: str | None = None  # what its test split is, where it has one of another text


WIKIPEDIA = "English Wikipedia 2015 extract"
# By data_sha256: a folder may be called anything.
KNOWN = {
    "856cb41b4eaa4891005e8543a2620936031621e258b6a8dddd4968c0ab345fc3": Text(
        WIKIPEDIA,
        "WikiText-103's validation split in its tokenised form, while training and validation text "
        "are plain",
    ),
}
# Of the time before runs noted it; nobody else's folder has this name.
WITHOUT_HASH = {"wikipedia-10m": Text(f"10 M tokens of the {WIKIPEDIA}")}


def known_text(run: Run | RecallStudy) -> Text | None:
    """What is known of the text of a run."""
    if run.data_sha256 is not None:
        return KNOWN.get(run.data_sha256)
    folder = run.config["data"].get("folder")
    return WITHOUT_HASH.get(Path(folder).name) if folder is not None else None


def corpus_title(run: Run | RecallStudy) -> str:
    """The known name, or corpus and folder as they were given."""
    if (text := known_text(run)) is not None:
        return text.title
    if isinstance(run, RecallStudy) and run.data is not None:
        return run.data
    data = run.config["data"]
    corpus = Path(data["corpus"]).name
    if data["folder"] is not None:  # its text need not have come from data.corpus
        corpus += f" from {Path(data['folder']).name}"
    return corpus
