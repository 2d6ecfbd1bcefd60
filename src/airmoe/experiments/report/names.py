"""Variants as people read them: their name, their place in a table, their line in a figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
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
AMOUNT = "([1-9][0-9]{0,11})"  # others are names like any: figures have them on a log axis
GRANULARITY = re.compile(f"q{AMOUNT}")
CODEBOOK = re.compile(f"g{AMOUNT}-m{AMOUNT}")


@dataclass(frozen=True)
class Codebook:
    """The settings in the name of a variant of the codebook suite."""

    num_codewords: int
    shortlist_size: int


@dataclass(frozen=True)
class Style:
    """A line that can be told from the others without its colour."""

    colour: str
    dashes: str | tuple[float, tuple[float, ...]]
    marker: str


# Of Okabe and Ito those that show on white, then of Tol; every line has its own marker as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9")
COLOURS += ("#882255", "#999933", "#332288")
GREY = "#767676"
DASHES = (
    *("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)), (0, (2, 2))),
    *((0, (6, 2, 1, 2, 1, 2)), (0, (3, 1, 1, 1)), (0, (9, 1)), (0, (1, 3)), (0, (8, 2, 3, 2))),
    *((0, (3, 4)), (0, (9, 2, 1, 2, 1, 2, 1, 2))),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h", "d", "8")
EXACT = Style(GREY, (0, (4, 1.5)), "x")  # scores all experts: the paper greys it out


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
        return f"G = {book.num_codewords}, M = {book.shortlist_size}"
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
        return 1, (book.num_codewords, book.shortlist_size), variant
    return 2, (), variant


def style_at(slot: int) -> Style:
    """Different for every slot: those that share a marker differ in their dashes."""
    dashes = (slot + slot // len(MARKERS)) % len(DASHES)
    return Style(COLOURS[slot % len(COLOURS)], DASHES[dashes], MARKERS[slot % len(MARKERS)])


def styles_of(variants: Sequence[str]) -> dict[str, Style]:
    """Of the lines of one figure: a known variant has its own in all, the others those left."""
    slots = {one: ORDER.index(one) for one in variants if one in ORDER and one != "exact"}
    free = (slot for slot in count() if slot not in slots.values())
    return {
        one: EXACT if one == "exact" else style_at(slots[one] if one in slots else next(free))
        for one in variants
    }
