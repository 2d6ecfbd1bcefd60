"""Runs that may share a table: same suite, preset, corpus and budget. The rest is named."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

from airmoe.experiments.fairness import ALL_RULES, Rule, Violation, violations
from airmoe.experiments.report.names import PREPARING, corpus_title, own_recipe, place_of
from airmoe.experiments.report.record import OLD_BALANCE, Run
from airmoe.experiments.suites import SUITES
from airmoe.experiments.suites.folder import flat

MOST_NAMED = 4  # differing settings in one line
SEEDS = "training.seed"
LONGEST_SLUG = 180  # file systems take names of 255 bytes; those of figures say more


@dataclass(frozen=True)
class Key:
    """What makes runs comparable."""

    suite: str | None
    preset: str
    corpus: str
    budget: str

    @property
    def title(self) -> str:
        suite = (self.suite or "single runs").capitalize()
        return f"{suite}: {self.preset}, {self.corpus}, {self.budget}"


@dataclass(frozen=True)
class Group:
    """The runs of one table."""

    key: Key
    runs: list[Run]
    slug: str  # its name in files and anchors; unique in a report
    changes: str = ""  # settings that differ from those of the first table

    @cached_property
    def variants(self) -> dict[str, list[Run]]:
        """Variant -> its seeds, in the order of the tables."""
        names = sorted({run.variant for run in self.runs}, key=place_of)
        return {
            name: sorted((run for run in self.runs if run.variant == name), key=lambda r: r.seed)
            for name in names
        }

    @property
    def title(self) -> str:
        return _title(self.key, self.changes)


def _title(key: Key, changes: str) -> str:
    return f"{key.title}, with {changes}" if changes else key.title


@dataclass(frozen=True)
class Grouped:
    """Groups, a line for each run that was left out, and notes about the others."""

    groups: list[Group]
    left_out: list[str]
    notes: list[str]


def group_runs(runs: Iterable[Run]) -> Grouped:
    """Sort runs into groups that share a text, a balance loss and each variant's settings."""
    by_key: dict[Key, list[Run]] = {}
    for run in runs:
        by_key.setdefault(key_of(run), []).append(run)
    grouped = Grouped([], [], [])
    for key in sorted(by_key, key=_place):
        kept = _without_repeats(by_key[key], grouped.left_out)
        kept = _of_one_balance(_of_one_text(kept, grouped.left_out), grouped)
        for changes, runs_alike in _by_settings(kept).items():
            slug = _slug(_title(key, changes), {group.slug for group in grouped.groups})
            grouped.groups.append(group := Group(key, runs_alike, slug, changes))
            grouped.notes.extend(_differences(group))
    return replace(grouped, groups=[_without_offenders(one, grouped) for one in grouped.groups])


def _slug(title: str, taken: Collection[str]) -> str:
    """A title in letters and digits for any file system; a number tells equal ones apart."""
    plain = re.sub(r"[^a-z0-9]+", "-", title.lower().replace(",", ""))[:LONGEST_SLUG]
    return plain if plain not in taken else _numbered(plain, taken)


def _numbered(name: str, taken: Collection[str]) -> str:
    return next(one for n in count(2) if (one := f"{name}-{n}") not in taken)


def _place(key: Key) -> tuple[int, str]:
    """Suites in the order in which they are read, single runs last."""
    names = list(SUITES)
    return names.index(key.suite) if key.suite in names else len(names), str(key)


def key_of(run: Run) -> Key:
    data, training = run.config["data"], run.config["training"]
    if training["epochs"] is not None:
        budget = f"{training['epochs']} epoch{'' if training['epochs'] == 1 else 's'}"
    else:
        tokens = training["steps"] * training["batch_size"] * data["block_size"]
        budget = f"{tokens:,} tokens"
    return Key(run.suite, run.config["preset"], corpus_title(run), budget)


def _without_repeats(runs: list[Run], left_out: list[str]) -> list[Run]:
    """One run per variant, seed and settings."""
    kept: dict[tuple[str, int, str, str | None], Run] = {}
    for run in runs:
        key = (run.variant, run.seed, settings_of(run), run.data_sha256)
        if (same := kept.setdefault(key, run)) is not run:
            left_out.append(f"{run.name}: the same variant and seed as {same.name}: left out")
    return list(kept.values())


def _of_one_text(runs: list[Run], left_out: list[str]) -> list[Run]:
    """Perplexities on different texts do not compare: keep the text of most runs."""
    common = Counter(run.data_sha256 for run in runs).most_common(1)[0][0]
    for run in runs:
        if run.data_sha256 != common:
            found, usual = ((one or "unknown")[:12] for one in (run.data_sha256, common))
            left_out.append(
                f"{run.name}: other text than the rest of its group (data hash {found}, not "
                f"{usual}): left out"
            )
    return [run for run in runs if run.data_sha256 == common]


def _of_one_balance(runs: list[Run], grouped: Grouped) -> list[Run]:
    """Balance losses of the two conventions differ by a factor K, so keep today's and never mix."""
    old = [run for run in runs if not run.is_current]
    if old and not any(run.convention is not None for run in runs if run not in old):
        about = f"{OLD_BALANCE}, K times weaker than today's: compares with no run of today"
        grouped.notes.append(f"{_title(key_of(runs[0]), '')}: the balance loss is that of {about}")
        return runs
    for run in old:
        grouped.left_out.append(
            f"{run.name}: balance loss with {OLD_BALANCE}, K times weaker than that of the rest of "
            "its group: left out"
        )
    return [run for run in runs if run.is_current]


def _by_settings(runs: list[Run]) -> dict[str, list[Run]]:
    """Settings that differ from the first run of a variant ("": none) -> runs.

    The seeds of a variant share its settings. A suite that was run again with others is a table of
    its own; a single run gets a row of its own.
    """
    rows: dict[str, dict[str, list[Run]]] = {}  # variant -> settings -> its seeds
    for run in runs:
        rows.setdefault(run.variant, {}).setdefault(settings_of(run), []).append(run)
    tables: dict[str, list[Run]] = {"": []}
    for variant, of_settings in rows.items():
        first, *others = of_settings.values()
        tables[""] += first
        if first[0].suite is None:
            names = _row_names([first, *others])[1:]
            for row, name in zip(others, names, strict=True):
                tables[""] += [replace(run, variant=f"{variant} ({name})") for run in row]
        else:
            for row in others:
                tables.setdefault(_changes(first[0], row[0]), []).extend(row)
    return tables


def settings_of(run: Run) -> str:
    """All settings but the seed: runs with the same are one row of a table."""
    values = {key: value for key, value in options_of(run).items() if value is not None}
    values.pop(SEEDS, None)
    equal_numbers = json.loads(json.dumps(values), parse_int=float)  # 1 is 1.0
    return json.dumps(equal_numbers, sort_keys=True)


def _row_names(rows: list[list[Run]]) -> list[str]:
    """Names of rows: the last parts of their folders, as many as it takes to tell them apart."""
    folders = [row[0].name.split("/") for row in rows]
    names: list[str] = []
    for length in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-length:]) for parts in folders]
        if len(set(names)) == len(names):
            return names
    taken: list[str] = []  # runs of several reports may have the same name
    for name in names:
        taken.append(_numbered(name, {*names, *taken}) if name in taken else name)
    return taken


def _changes(one: Run, other: Run) -> str:
    """The settings of `other` that differ: `training.warmup = 0.1`."""
    mine, theirs = options_of(one), options_of(other)
    found = [
        f"{key} = {json.dumps(theirs.get(key))}"
        for key in sorted(mine.keys() | theirs.keys())
        if key != SEEDS and mine.get(key) != theirs.get(key)
    ]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def options_of(run: Run) -> dict[str, Any]:
    """Settings as `section.option` -> value; for a ready-made text, how it was prepared."""
    options, recipe = flat(run.config), own_recipe(run)
    if recipe is None:
        return options
    used = {key: value for key, value in options.items() if key not in PREPARING}
    names = ("corpus", "split_rule", "max_tokens")
    return used | {f"text.{name}": recipe.get(name) for name in names}


def _differences(group: Group) -> list[str]:
    """What makes means or times of a group hard to compare."""
    seeds: dict[str, list[str]] = {}
    for variant, runs in group.variants.items():
        seeds.setdefault(", ".join(str(run.seed) for run in runs), []).append(variant)
    notes = []
    if len(seeds) > 1:  # means over different seeds do not compare
        listed = "; ".join(f"{which} of {', '.join(names)}" for which, names in seeds.items())
        notes.append(f"{group.title}: not every variant has every seed ({listed})")
    values = {
        "machines": machines(group.runs),
        "versions of torch": torch_versions(group.runs),
        "commits": sorted({str(run.git.get("commit"))[:10] for run in group.runs}),
    }
    for what, found in values.items():
        if len(found) > 1:
            listed = "; ".join(found)
            notes.append(f"{group.title}: different {what} ({listed}): times do not compare")
    return notes


def machines(runs: Sequence[Run]) -> list[str]:
    return sorted({f"{run.machine.get('count')} x {run.machine.get('device')}" for run in runs})


def torch_versions(runs: Sequence[Run]) -> list[str]:
    return sorted({run.versions.get("torch", "?") for run in runs})


def _without_offenders(group: Group, grouped: Grouped) -> Group:
    """Drop variants that alone break a rule of their suite; every violation gets a line."""
    suite = SUITES.get(group.key.suite or "")
    rules = ALL_RULES if suite is None else suite.rules
    while found := _violations(group, rules):
        offenders = ((_offender(one, group), one) for one in found)
        offender, violation = next((pair for pair in offenders if pair[0]), (None, None))
        if offender is None or group.key.suite is None:  # single runs promise no equality
            grouped.notes.extend(f"{group.title}: {one}" for one in found)
            break
        grouped.left_out.append(f"{group.title}: {offender} is left out. {violation}")
        group = _without(offender, group)
    return group


def _offender(violation: Violation, group: Group) -> str | None:
    """The one variant without which the rule would hold; None where there are several."""
    if len(group.variants) < 3:
        return None
    mending = [
        variant
        for variant in group.variants
        if all(
            one.what != violation.what
            for one in _violations(_without(variant, group), [violation.rule])
        )
    ]
    return mending[0] if len(mending) == 1 else None


def _without(variant: str, group: Group) -> Group:
    return replace(group, runs=[run for run in group.runs if run.variant != variant])


def _violations(group: Group, rules: Sequence[Rule]) -> list[Violation]:
    """Of one run per variant: its seeds share their settings and are compared by `_differences`.

    A group has one text, so what a run would have prepared does not matter where it was not asked.
    """
    firsts = {variant: seeds[0] for variant, seeds in group.variants.items()}
    ignored = PREPARING if all(map(own_recipe, firsts.values())) else ()
    found = violations({variant: run.settings for variant, run in firsts.items()}, rules)
    return [one for one in found if one.what not in (SEEDS, *ignored)]
