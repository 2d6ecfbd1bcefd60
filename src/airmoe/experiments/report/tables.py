"""Tables as plain data: a row per variant, mean and spread over seeds, the best in bold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from airmoe.experiments.report import metrics
from airmoe.experiments.report.groups import Group, granularity_of, text_of, title_of
from airmoe.experiments.report.metrics import (
    DASH,
    Metric,
    Summary,
    sees_future,
    summarize,
    unit_of,
)
from airmoe.experiments.report.record import Run
from airmoe.experiments.suites.folder import flat

COSTS = (metrics.FLOPS, metrics.EXECUTED, metrics.SECONDS, metrics.SPEED, metrics.MEMORY)
PERPLEXITIES = (metrics.PERPLEXITY, metrics.TEST)
AGREEMENT = (metrics.OVERLAP, metrics.RECALL)  # with exact routing
USE = (metrics.DEAD, metrics.ENTROPY)
MOVED_BY_SEEDS = (*PERPLEXITIES, metrics.LOSS, *USE, *AGREEMENT)

# Suite -> its columns and caption; everything else is a comparison of methods.
OF_SUITE = {
    "ablations": ((*PERPLEXITIES, *COSTS, *USE, *AGREEMENT), "AIR without one of its parts."),
    "codebook": (
        (*AGREEMENT, metrics.BOUND, metrics.PERPLEXITY, *COSTS, metrics.DEAD),
        "Codewords G and shortlists of M experts.",
    ),
    "granularity": ((metrics.LOSS, *PERPLEXITIES, *COSTS, *USE), "Experts Q times as small."),
}
OF_METHODS = (
    (*PERPLEXITIES, *COSTS, metrics.TOTAL, metrics.ACTIVE, *USE, metrics.OVERLAP),
    "All methods at their lowest validation perplexity.",
)

FUTURE_MARK, REFERENCE_MARK = "†", "‡"
FUTURE_NOTE = "† Expert choice sees later tokens of the text: its perplexity is not comparable."
REFERENCE_NOTE = "‡ Scores every expert: a reference, not a competitor."
MOST_DEAD = 0.05  # of the experts, where overlap still says something
COLLAPSE_NOTE = (
    "Overlap and mass recall are never bold beside more than 5 % dead experts: lists easily find "
    "the few that are left."
)
SPREAD_NOTE = (
    "± is the sample standard deviation over the seeds; it is left out with one seed, or if all "
    "agree."
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Text of a table, with the number to sort by."""

    text: str
    value: float | None = None
    bold: bool = False  # the best of its column
    grey: bool = False  # a reference, not a competitor
    mark: str = ""  # of a footnote


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first column holds names, the others numbers unless `words`."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    words: bool = False


def group_table(group: Group) -> Table:
    """The table of a group, with the columns of its suite."""
    columns, caption = OF_SUITE.get(group.key.suite or "", OF_METHODS)
    return variant_table(group, columns, caption)


def variant_table(group: Group, columns: Sequence[Metric], caption: str) -> Table:
    """A row per variant with a cell per metric that some run has, and the footnotes they need."""
    names, seeds = [], []
    for variant, runs in group.variants.items():
        grey = is_reference(runs[0])
        mark = REFERENCE_MARK if grey else FUTURE_MARK if sees_future(runs[0]) else ""
        names.append(Cell(text=title_of(variant), grey=grey, mark=mark))
        seeds.append(Cell(text=str(len(runs)), value=len(runs), grey=grey))
    shown = [one for one in columns if summarize(one, group.runs)]
    made = {"method": names, "seeds": seeds} | dict(_column(metric, group) for metric in shown)
    rows = list(map(list, zip(*made.values(), strict=True)))
    return Table(caption=caption, columns=list(made), rows=rows, notes=_notes(group, shown))


def _column(metric: Metric, group: Group) -> tuple[str, list[Cell]]:
    """Heading and cells."""
    found = {variant: summarize(metric, runs) for variant, runs in group.variants.items()}
    means = {variant: one.mean for variant, one in found.items() if one}
    unit, best = unit_of(metric.kind, list(means.values())), _best(metric, means, group)
    cells = []
    for variant, runs in group.variants.items():
        text = unit.written(found[variant])
        ideal = metric.ideal(runs[0]) if metric.ideal is not None else None
        cell = Cell(
            text=text if ideal is None else f"{text} of {ideal:.2f}",
            value=means.get(variant),
            bold=variant in best,
            grey=is_reference(runs[0]),
            mark=FUTURE_MARK if metric in PERPLEXITIES and sees_future(runs[0]) else "",
        )
        cells.append(cell)
    return unit.titled(metric.title), cells


def _best(metric: Metric, means: dict[str, float], group: Group) -> list[str]:
    """The variants with the best mean as printed; none where rows do not compare."""
    competing = {
        variant: runs
        for variant, runs in group.variants.items()
        if variant in means and _competes(metric, runs)
    }
    seeds = {frozenset(run.seed for run in runs) for runs in competing.values()}
    ideals = {metric.ideal and metric.ideal(runs[0]) for runs in competing.values()}
    is_moved = metric in MOVED_BY_SEEDS and len(seeds) > 1
    unit = unit_of(metric.kind, list(means.values()))
    texts = {one: unit.written(Summary(means[one])) for one in competing}
    if metric.better is None or is_moved or len(ideals) > 1 or len(set(texts.values())) < 2:
        return []
    best = (min if metric.better == "low" else max)(competing, key=means.__getitem__)
    return [variant for variant, text in texts.items() if text == texts[best]]


def _notes(group: Group, shown: Sequence[Metric]) -> list[str]:
    notes = note_on_test(group.runs) if metrics.TEST in shown else []
    notes += [SPREAD_NOTE] if any(len(runs) > 1 for runs in group.variants.values()) else []
    notes += [FUTURE_NOTE] if any(map(sees_future, group.runs)) else []
    notes += [REFERENCE_NOTE] if any(map(is_reference, group.runs)) else []
    collapsed = [
        title_of(variant)
        for variant, runs in group.variants.items()
        if is_collapsed(runs) and any(summarize(one, runs) for one in AGREEMENT if one in shown)
    ]
    return notes + ([f"{COLLAPSE_NOTE} Here: {', '.join(collapsed)}."] if collapsed else [])


def note_on_test(runs: Sequence[Run]) -> list[str]:
    """What the test text is, where a run was measured on one of another origin."""
    _, test = text_of(runs[0])
    return [f"Test text: {test}."] if test and summarize(metrics.TEST, runs) else []


def _competes(metric: Metric, runs: Sequence[Run]) -> bool:
    not_comparable = metric in PERPLEXITIES and sees_future(runs[0])
    collapsed = metric in AGREEMENT and is_collapsed(runs)
    return not is_reference(runs[0]) and not not_comparable and not collapsed


def is_collapsed(runs: Sequence[Run]) -> bool:
    """Whether, for any seed, too many experts are dead for the overlap to mean something."""
    return any((metrics.DEAD.read(run) or 0.0) > MOST_DEAD for run in runs)


def is_reference(run: Run) -> bool:
    """Exact granular routing; in the granularity suite it is a point like the others."""
    return run.method == "exact" and granularity_of(run.variant) is None


def settings_table(group: Group) -> Table:
    """Everything needed to run it again: a value, or one per variant where they differ."""
    described = {variant: _described(runs) for variant, runs in group.variants.items()}
    rows = []
    for key in dict.fromkeys(key for values in described.values() for key in values):
        found = {variant: values.get(key, DASH) for variant, values in described.items()}
        text = next(iter(found.values()))
        if len(set(found.values())) > 1:
            text = "; ".join(f"{title_of(variant)}: {value}" for variant, value in found.items())
        rows.append([Cell(text=key), Cell(text=text)])
    caption = "Settings, versions and machine."
    return Table(caption=caption, columns=["setting", "value"], rows=rows, words=True)


def _described(runs: Sequence[Run]) -> dict[str, str]:
    """Setting -> its value, or all the values that the seeds of a variant have."""
    found: dict[str, list[str]] = {}
    for run in runs:
        about = {"text": run.recipe, "git": run.git, "machine": run.machine}
        values = {"data hash": run.data_sha256, **run.config, **about, "versions": run.versions}
        for key, value in flat(values).items():
            text = value if isinstance(value, str) else DASH if value is None else json.dumps(value)
            found.setdefault(key, []).append(text)
    return {key: ", ".join(dict.fromkeys(values)) for key, values in found.items()}
