"""Tables as plain data: a row per variant, mean and spread over seeds, the best in bold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from airmoe.experiments.report import metrics
from airmoe.experiments.report.corpora import known_text
from airmoe.experiments.report.groups import Group, options_of
from airmoe.experiments.report.metrics import (
    DASH,
    Metric,
    Summary,
    sees_future,
    summarize,
    unit_of,
    written,
)
from airmoe.experiments.report.names import granularity_of, title_of
from airmoe.experiments.report.record import Run
from airmoe.experiments.suites.folder import flat

COSTS = (metrics.SECONDS, metrics.SPEED, metrics.MEMORY)
MAIN = (
    metrics.PERPLEXITY,
    metrics.TEST,
    metrics.FLOPS,
    metrics.EXECUTED,
    *COSTS,
    metrics.TOTAL,
    metrics.ACTIVE,
    metrics.DEAD,
    metrics.ENTROPY,
    metrics.OVERLAP,
)
ABLATIONS = (
    metrics.PERPLEXITY,
    metrics.TEST,
    metrics.FLOPS,
    *COSTS,
    metrics.DEAD,
    metrics.OVERLAP,
    metrics.RECALL,
    metrics.ENTROPY,
)
CODEBOOK = (
    metrics.OVERLAP,
    metrics.RECALL,
    metrics.BOUND,
    metrics.PERPLEXITY,
    metrics.FLOPS,
    metrics.EXECUTED,
    metrics.SECONDS,
    metrics.DEAD,
)
GRANULARITY = (metrics.LOSS, metrics.PERPLEXITY, metrics.FLOPS, metrics.SECONDS, metrics.DEAD)
PERPLEXITIES = (metrics.PERPLEXITY, metrics.TEST)
AGREEMENT = (metrics.OVERLAP, metrics.RECALL)  # with exact routing
MOVED_BY_SEEDS = (*PERPLEXITIES, metrics.LOSS, metrics.DEAD, metrics.ENTROPY, *AGREEMENT)
# Suite -> its columns and caption; everything else is a comparison of methods.
OF_SUITE = {
    "ablations": (ABLATIONS, "AIR without one of its parts."),
    "codebook": (CODEBOOK, "Codewords G and shortlists of M experts."),
    "granularity": (GRANULARITY, "Experts Q times as small."),
}
OF_METHODS = (MAIN, "All methods at their lowest validation perplexity.")

FUTURE_MARK, REFERENCE_MARK = "†", "‡"
FUTURE_NOTE = "† Expert choice sees later tokens of the text: its perplexity is not comparable."
REFERENCE_NOTE = "‡ Scores every expert: the reference, out of competition."
MOST_DEAD = 0.05  # of the experts, where overlap still says something
COLLAPSE_NOTE = (
    "Overlap and mass recall beside more than 5 % dead experts are never bold: where few experts "
    "are left, lists find them easily."
)
SPREAD_NOTE = (
    "± is the sample standard deviation over the seeds; without it there is one, or all agree."
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Text of a table, with the number to sort by."""

    text: str
    value: float | None = None
    bold: bool = False  # the best of its column
    grey: bool = False  # a reference, out of competition
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


def variant_table(group: Group, metrics_shown: Sequence[Metric], caption: str) -> Table:
    """A row per variant with a cell per metric, and the footnotes they need."""
    variants, columns = group.variants, ["method", "seeds"]
    rows = [
        [_name_cell(variant, runs), _count_cell(len(runs), grey=is_reference(runs[0]))]
        for variant, runs in variants.items()
    ]
    shown = [one for one in metrics_shown if not one.optional or summarize(one, group.runs)]
    for metric in shown:
        column = _column(metric, group)
        columns.append(column.title)
        for row, cell in zip(rows, column.cells, strict=True):
            row.append(cell)
    notes = note_on_test(group.runs) if metrics.TEST in shown else []
    notes += [SPREAD_NOTE] if any(len(runs) > 1 for runs in variants.values()) else []
    notes += [FUTURE_NOTE] if any(sees_future(run) for run in group.runs) else []
    notes += [REFERENCE_NOTE] if any(is_reference(run) for run in group.runs) else []
    notes += _note_on_collapse(group, shown)
    return Table(caption=caption, columns=columns, rows=rows, notes=notes)


def note_on_test(runs: Sequence[Run]) -> list[str]:
    """What the test text is, where a run was measured on one of another origin."""
    text = known_text(runs[0])
    measured = summarize(metrics.TEST, runs) is not None
    return [f"Test text: {text.test}."] if measured and text and text.test else []


def _note_on_collapse(group: Group, shown: Sequence[Metric]) -> list[str]:
    """Which rows are out of the contest for the overlap."""
    found = [
        title_of(variant)
        for variant, runs in group.variants.items()
        if is_collapsed(runs) and any(summarize(one, runs) for one in AGREEMENT if one in shown)
    ]
    return [f"{COLLAPSE_NOTE} Here: {', '.join(found)}."] if found else []


@dataclass(frozen=True)
class _Column:
    """A metric's title with its unit, and its cells in the order of the variants."""

    title: str
    cells: list[Cell]


def _column(metric: Metric, group: Group) -> _Column:
    found = {variant: summarize(metric, runs) for variant, runs in group.variants.items()}
    unit = unit_of(metric.kind, [one.mean for one in found.values() if one is not None])
    means = {  # as they are written: equal texts are equally good
        variant: written(Summary(one.mean, None, 1), metric.kind, unit)
        for variant, one in found.items()
        if one is not None
    }
    best = _best(metric, group, found)
    cells = []
    for variant, runs in group.variants.items():
        one, text = found[variant], written(found[variant], metric.kind, unit)
        ideal = metric.ideal(runs[0]) if metric.ideal is not None else None
        is_best = best is not None and means.get(variant) == means[best]
        cells.append(
            Cell(
                text=text if ideal is None else f"{text} of {ideal:.2f}",
                value=None if one is None else one.mean,
                bold=is_best and _competes(metric, runs),
                grey=is_reference(runs[0]),
                mark=FUTURE_MARK if metric in PERPLEXITIES and sees_future(runs[0]) else "",
            )
        )
    return _Column(f"{metric.title} ({unit.name})" if unit.name else metric.title, cells)


def _best(metric: Metric, group: Group, found: dict[str, Summary | None]) -> str | None:
    """The variant with the best mean; None without a contest that is fair."""
    means = {
        variant: one.mean
        for variant, runs in group.variants.items()
        if (one := found[variant]) is not None and _competes(metric, runs)
    }
    if metric.better is None or len(set(means.values())) < 2:
        return None
    competing = [group.variants[variant] for variant in means]
    seeds = {frozenset(run.seed for run in runs) for runs in competing}
    if metric in MOVED_BY_SEEDS and len(seeds) > 1:
        return None
    if metric.ideal is not None and len({metric.ideal(runs[0]) for runs in competing}) > 1:
        return None
    return (min if metric.better == "low" else max)(means, key=means.__getitem__)


def _competes(metric: Metric, runs: Sequence[Run]) -> bool:
    not_comparable = metric in PERPLEXITIES and sees_future(runs[0])
    collapsed = metric in AGREEMENT and is_collapsed(runs)
    return not is_reference(runs[0]) and not not_comparable and not collapsed


def is_collapsed(runs: Sequence[Run]) -> bool:
    """Whether more experts are dead than an overlap can be judged beside; of any seed."""
    return any((metrics.DEAD.read(run) or 0.0) > MOST_DEAD for run in runs)


def is_reference(run: Run) -> bool:
    """Exact granular routing; as a point of the granularity suite it is in the contest."""
    return run.method == "exact" and granularity_of(run.variant) is None


def _name_cell(variant: str, runs: Sequence[Run]) -> Cell:
    grey = is_reference(runs[0])
    mark = REFERENCE_MARK if grey else FUTURE_MARK if sees_future(runs[0]) else ""
    return Cell(text=title_of(variant), grey=grey, mark=mark)


def _count_cell(value: int, *, grey: bool = False) -> Cell:
    return Cell(text=f"{value:,}", value=value, grey=grey)


def settings_table(group: Group) -> Table:
    """Everything needed to run it again: a value, or one for each variant where they differ."""
    described = {variant: _described(runs) for variant, runs in group.variants.items()}
    rows = []
    for key in dict.fromkeys(key for values in described.values() for key in values):
        found = {variant: values.get(key, DASH) for variant, values in described.items()}
        text = next(iter(found.values()))
        if len(set(found.values())) > 1:
            text = "; ".join(f"{title_of(variant)}: {value}" for variant, value in found.items())
        rows.append([Cell(text=key), Cell(text=text)])
    return Table(
        caption="Settings, versions and machine.",
        columns=["setting", "value"],
        rows=rows,
        words=True,
    )


def _described(runs: Sequence[Run]) -> dict[str, str]:
    """Setting -> its value, or all the values that the seeds of a variant have."""
    found: dict[str, dict[str, None]] = {}  # an ordered set
    for run in runs:
        about = {
            "data hash": run.data_sha256,
            "balance loss": run.convention,
            "git": run.git,
            "machine": run.machine,
            "versions": run.versions,
        }
        for key, value in (options_of(run) | flat(about)).items():
            found.setdefault(key, {})[_text(value)] = None
    return {key: ", ".join(values) for key, values in found.items()}


def _text(value: Any) -> str:
    if value is None:
        return DASH
    return value if isinstance(value, str) else json.dumps(value)
