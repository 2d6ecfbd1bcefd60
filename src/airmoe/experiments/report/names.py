"""Variants as people read them: their name, their place in a table, their line in a figure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

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
ORDER = tuple(TITLES)
REFERENCE = "exact"  # scores all experts: the paper greys it out
GRANULARITY = re.compile(r"q(\d+)")
CODEBOOK = re.compile(r"g(\d+)-m(\d+)-p(\d+)")


@dataclass(frozen=True)
class Codebook:
    """The settings in the name of a variant of the codebook suite."""

    num_codewords: int
    shortlist_size: int
    probes: int


@dataclass(frozen=True)
class Style:
    """A line that can be told from the others without its colour."""

    colour: str
    dashes: str | tuple[float, tuple[float, ...]]
    marker: str


# The colours of Okabe and Ito that show on white; every line has its own marker as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#767676"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)), (0, (2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SLOTS = {
    "air": 0,
    "peer": 1,
    "hierarchical": 2,
    "coarse": 3,
    "no_projection": 4,
    "static": 1,
    "expert_choice": 3,
    "euclidean": 2,
    "dense": 5,
}


def method_of(model: dict[str, Any]) -> str:
    """The variant that a model's settings make, for runs outside a suite."""
    router, options = model.get("router", "air"), model.get("router_options") or {}
    if model.get("moe_layers") == []:
        return "dense"
    if model.get("experts") == "coarse":
        return "coarse"
    if router == "topk":
        return "exact"
    if router != "air":
        return router
    if options.get("gate") == "expert_choice":
        return "expert_choice"
    if options.get("codebook", "spherical") != "spherical":
        return options["codebook"]
    return "no_projection" if options.get("normalize_centroids") is False else "air"


def granularity_of(variant: str) -> int | None:
    found = GRANULARITY.fullmatch(variant)
    return int(found[1]) if found else None


def codebook_of(variant: str) -> Codebook | None:
    found = CODEBOOK.fullmatch(variant)
    return Codebook(*map(int, found.groups())) if found else None


def title_of(variant: str) -> str:
    if (amount := granularity_of(variant)) is not None:
        return f"Q = {amount}"
    if (book := codebook_of(variant)) is not None:
        plural = "" if book.probes == 1 else "s"
        return f"G = {book.num_codewords}, M = {book.shortlist_size}, {book.probes} probe{plural}"
    return TITLES.get(variant, variant)


def label_of(variant: str) -> str:
    """For figures, where dollars would begin a formula."""
    return title_of(variant).replace("$", r"\$")


def place_of(variant: str) -> tuple[int, tuple[int, ...], str]:
    """Sorts variants: known ones in the paper's order, numbers as numbers, then by name."""
    if variant in ORDER:
        return 0, (ORDER.index(variant),), variant
    if (amount := granularity_of(variant)) is not None:
        return 1, (amount,), variant
    if (book := codebook_of(variant)) is not None:
        return 1, (book.num_codewords, book.shortlist_size, book.probes), variant
    return 2, (), variant


def style_of(variant: str, index: int) -> Style:
    """The same for a known variant in every figure; others by their `index` in the group."""
    if variant == REFERENCE:
        return Style(GREY, (0, (4, 1.5)), "x")
    slot = SLOTS.get(variant, index) % len(COLOURS)
    return Style(COLOURS[slot], DASHES[slot], MARKERS[slot])
