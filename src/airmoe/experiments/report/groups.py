"""Runs that share a table: those of the same suite, preset, text and budget; and their names.

Whatever else makes them hard to compare becomes a note, broken rules of fairness.py included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count

from airmoe.experiments.fairness import ALL_RULES, violations
from airmoe.experiments.report.record import Run
from airmoe.experiments.suites import SUITES
from airmoe.experiments.suites.folder import flat

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
GRANULARITY = re.compile(r"q([1-9]\d*)")
SEED = "training.seed"
# How a text was made; runs of one table have the same text anyway.
PREPARING = ("corpus", "tokenizer", "folder", "validation", "validation_fraction", "max_tokens")
TEXT_OPTIONS = tuple(f"data.{name}" for name in PREPARING)
# By data_sha256, the hash of the tokens: texts with a proper name, and what their test splits are.
KNOWN = {
    "08f75da0b97d11669f691c5e267dbcffe0ac262e8f77ab8bc0d6396b97ae6866": (
        "English Wikipedia 2015 extract",
        "WikiText-103's validation split in its tokenised form, while training and validation text "
        "are plain",
    ),
}


def granularity_of(variant: str) -> int | None:
    found = GRANULARITY.fullmatch(variant)
    return int(found[1]) if found else None


def title_of(variant: str) -> str:
    if level := granularity_of(variant):
        return f"Q = {level}"
    method, bracket, rest = variant.partition(" (")
    return TITLES.get(method, method) + bracket + rest


def place_of(variant: str) -> tuple[int, int, str]:
    """The sort key of a variant: the paper's order, then granularity, then the name."""
    method = variant.partition(" (")[0]
    known = ORDER.index(method) if method in ORDER else len(ORDER)
    return known, granularity_of(variant) or 0, variant


def text_of(run: Run) -> tuple[str, str | None]:
    """What the text of a run is called, and its test split if that comes from elsewhere."""
    return KNOWN.get(run.data_sha256, (run.recipe["corpus"], None))


@dataclass(frozen=True)
class Group:
    """The runs of one table."""

    runs: list[Run]
    title: str  # unique in a report

    @property
    def suite(self) -> str | None:
        return self.runs[0].suite

    @property
    def preset(self) -> str:
        return self.runs[0].settings.preset

    @property
    def slug(self) -> str:
        """Its name in files and anchors."""
        first = self.runs[0]
        budget = budget_of(first).replace(",", "")
        parts = (self.suite or "single", self.preset, budget, first.data_sha256[:8])
        return re.sub(r"\W+", "-", "-".join(parts).lower())

    @property
    def is_sweep(self) -> bool:
        """Whether its variants differ in granularity."""
        return all(granularity_of(variant) is not None for variant in self.variants)

    @cached_property
    def variants(self) -> dict[str, list[Run]]:
        """Variant -> its seeds, in the order of the tables."""
        names = sorted({run.variant for run in self.runs}, key=place_of)
        return {
            name: sorted((run for run in self.runs if run.variant == name), key=lambda r: r.seed)
            for name in names
        }


@dataclass(frozen=True)
class Grouped:
    """Groups, a line for each run left out, and notes about the others."""

    groups: list[Group]
    left_out: list[str]
    notes: list[str]


def group_runs(runs: Iterable[Run]) -> Grouped:
    """Sort runs into groups: suites in the order in which they are read, single runs last."""
    comparable: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        key = (run.suite or "single runs", run.settings.preset, run.data_sha256, budget_of(run))
        comparable.setdefault(key, []).append(run)
    grouped = Grouped([], [], [])
    places = {name: place for place, name in enumerate(SUITES)}
    for key in sorted(comparable, key=lambda key: (places.get(key[0], len(places)), str(key))):
        suite, preset, data_sha256, budget = key
        named = _rows(comparable[key], grouped.left_out)
        title = f"{suite.capitalize()}: {preset}, {text_of(named[0])[0]}, {budget}"
        if title in (group.title for group in grouped.groups):
            title += f", data hash {data_sha256[:12]}"
        grouped.groups.append(group := Group(named, title))
        grouped.notes.extend(f"{title}: {note}" for note in _notes(group))
    return grouped


def budget_of(run: Run) -> str:
    training = run.settings.training
    if training.epochs is not None:
        return f"{training.epochs} epoch{'' if training.epochs == 1 else 's'}"
    tokens = (training.steps or 0) * training.batch_size * run.settings.data.block_size
    return f"{tokens:,} tokens"


def _rows(runs: list[Run], left_out: list[str]) -> list[Run]:
    """One run per seed and settings; other settings of a variant get a row named by the folder."""
    kept: dict[tuple[str, str, int], Run] = {}
    rows: dict[tuple[str, str], str] = {}  # variant and settings -> the name of the row
    for run in runs:
        row = (run.variant, settings_of(run))
        if (same := kept.setdefault((*row, run.seed), run)) is not run:
            left_out.append(f"{run.name}: the same variant and seed as {same.name}: left out")
        elif row not in rows:
            rows[row] = _row_name(run, [*rows.values()])
    return [replace(run, variant=rows[key[:2]]) for key, run in kept.items()]


def _row_name(run: Run, taken: Sequence[str]) -> str:
    folders = chain([run.name.rpartition("/")[2], run.name], (f"{run.name} {n}" for n in count(2)))
    names = chain([run.variant], (f"{run.variant} ({folder})" for folder in folders))
    return next(name for name in names if name not in taken)


def settings_of(run: Run, ignored: Sequence[str] = ()) -> str:
    """All settings but seed, text and `ignored`: runs with the same are one row of a table."""
    ignored = (SEED, *TEXT_OPTIONS, *ignored)
    values = {key: value for key, value in flat(run.config).items() if key not in ignored}
    return json.dumps(values, sort_keys=True)


def _notes(group: Group) -> list[str]:
    """What makes means or times of a group hard to compare."""
    seeds: dict[str, list[str]] = {}
    for variant, runs in group.variants.items():
        seeds.setdefault(", ".join(str(run.seed) for run in runs), []).append(variant)
    notes = []
    if len(seeds) > 1:  # means over different seeds do not compare
        listed = "; ".join(f"{which} of {', '.join(names)}" for which, names in seeds.items())
        notes.append(f"not every variant has every seed ({listed})")
    values = {
        "machines": machines(group.runs),
        "versions of torch": torch_versions(group.runs),
        "commits": sorted({str(run.git["commit"])[:10] for run in group.runs}),
    }
    for what, found in values.items():
        if len(found) > 1:
            notes.append(f"different {what} ({'; '.join(found)}): times do not compare")
    suite = SUITES.get(group.suite or "")
    rules = ALL_RULES if suite is None else suite.rules
    firsts = {variant: runs[0].settings for variant, runs in group.variants.items()}
    broken = violations(firsts, rules)
    return notes + [str(one) for one in broken if one.what not in TEXT_OPTIONS]


def machines(runs: Sequence[Run]) -> list[str]:
    return sorted({f"{run.machine['count']} x {run.machine['device']}" for run in runs})


def torch_versions(runs: Sequence[Run]) -> list[str]:
    return sorted({run.versions["torch"] for run in runs})
