"""Texts as people read them: the name of a corpus, and what its test split is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe.experiments.report.record import Run
from airmoe.training import PRESETS, preset


@dataclass(frozen=True)
class Text:
    """A prepared text that is known by more than its folder."""

    title: str
    test: str | None = None  # what its test split is, where it has one of another text


WIKIPEDIA = "English Wikipedia 2015 extract"
# By data_sha256, which is of the tokens: folders and files may be called anything.
KNOWN = {
    "08f75da0b97d11669f691c5e267dbcffe0ac262e8f77ab8bc0d6396b97ae6866": Text(
        WIKIPEDIA,
        "WikiText-103's validation split in its tokenised form, while training and validation text "
        "are plain",
    ),
}
# Options of a run that decide what is prepared, and nothing where that was done before.
PREPARING = ("data.corpus", "data.validation", "data.validation_fraction", "data.max_tokens")


def known_text(run: Run) -> Text | None:
    """What is known of the text of a run."""
    return KNOWN.get(run.data_sha256 or "")


def corpus_title(run: Run) -> str:
    """The known name, or that of the corpus and of the folder it was prepared in."""
    if (text := known_text(run)) is not None:
        return text.title
    folder = run.config["data"].get("folder")
    names = [corpus_of(run), None if folder is None else Path(folder).name]
    return " from ".join(dict.fromkeys(name for name in names if name is not None))


def corpus_of(run: Run) -> str | None:
    """What the text was prepared from; None where nobody says."""
    data = run.config["data"]
    if (recipe := own_recipe(run)) is not None:
        return recipe["corpus"]
    if data.get("folder") is not None and data["corpus"] == _usual_corpus(run.config["preset"]):
        return None  # nobody asked for it: a folder that is there is taken for what it is
    return Path(data["corpus"]).name


def _usual_corpus(name: str) -> str | None:
    return preset(name).data.corpus if name in PRESETS else None


def own_recipe(run: Run) -> dict[str, Any] | None:
    """That of a folder that the run was given, where it was noted.

    Without such a folder the run's own settings are the recipe.
    """
    if run.config["data"].get("folder") is None:
        return None
    return run.recipe
