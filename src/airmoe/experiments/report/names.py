"""How reports name variants and texts, and the order of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe.experiments.report.record import Run

TITLES = {
    "air": "AIR",
    "peer": "PEER",
    "hierarchical": "Hierarchical",
    "exact": "Exact granular",
    "coarse": "Coarse",
    "dense": "Dense",
    "no_projection": "No projection",
    "static": "Static codebook",
    "expert_choice": "Expert choice",
    "euclidean": "Euclidean",
}
ORDER = tuple(TITLES)  # of rows: the paper's
AMOUNT = "([1-9][0-9]{0,11})"  # others are names like any: figures have them on a log axis
GRANULARITY = re.compile(f"q{AMOUNT}")
CODEBOOK = re.compile(f"g{AMOUNT}-m{AMOUNT}")


def granularity_of(variant: str) -> int | None:
    found = GRANULARITY.fullmatch(variant)
    return int(found[1]) if found else None


def title_of(variant: str) -> str:
    if found := GRANULARITY.fullmatch(variant):
        return f"Q = {found[1]}"
    if found := CODEBOOK.fullmatch(variant):
        return f"G = {found[1]}, M = {found[2]}"
    return TITLES.get(variant, variant)


def place_of(variant: str) -> tuple[int, tuple[int, ...], str]:
    """Sorts variants: known ones in the paper's order, numbers as numbers, then by name."""
    if variant in ORDER:
        return 0, (ORDER.index(variant),), variant
    if found := GRANULARITY.fullmatch(variant) or CODEBOOK.fullmatch(variant):
        return 1, tuple(map(int, found.groups())), variant
    return 2, (), variant


@dataclass(frozen=True)
class Text:
    """A prepared text with a proper name."""

    title: str
    test: str | None = None  # what its test split is, if that comes from elsewhere


# By data_sha256, the hash of the tokens: folders and files may have any name.
KNOWN = {
    "08f75da0b97d11669f691c5e267dbcffe0ac262e8f77ab8bc0d6396b97ae6866": Text(
        "English Wikipedia 2015 extract",
        "WikiText-103's validation split in its tokenised form, while training and validation text "
        "are plain",
    ),
}
# Options that decide how a text is prepared; for a ready-made text they mean nothing.
PREPARING = ("data.corpus", "data.validation", "data.validation_fraction", "data.max_tokens")


def known_text(run: Run) -> Text | None:
    """The text of a run, if it is one of those."""
    return KNOWN.get(run.data_sha256 or "")


def corpus_title(run: Run) -> str:
    """The known name, or that of the corpus and of the folder it was prepared in."""
    if (text := known_text(run)) is not None:
        return text.title
    folder = run.config["data"].get("folder")
    names = [corpus_of(run), *([] if folder is None else [Path(folder).name])]
    return " from ".join(dict.fromkeys(names))


def corpus_of(run: Run) -> str:
    """What the text was prepared from."""
    recipe = own_recipe(run) or {"corpus": Path(run.config["data"]["corpus"]).name}
    return recipe["corpus"]


def own_recipe(run: Run) -> dict[str, Any] | None:
    """How the folder that a run was given had been prepared.

    None without such a folder: then the run's own settings are the recipe.
    """
    return None if run.config["data"].get("folder") is None else run.recipe
