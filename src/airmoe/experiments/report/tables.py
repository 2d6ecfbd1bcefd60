"""Tables as plain data: how each number is read from a run, averaged over seeds and formatted.

A row per variant, mean and spread over its seeds, the best of a column in bold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal

from airmoe.experiments.report.groups import Group, granularity_of, text_of, title_of
from airmoe.experiments.report.record import Run
from airmoe.experiments.suites.folder import flat

Kind = Literal["flops", "seconds", "count", "share", "plain", "tiny"]
DASH = "–"
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
DIGITS = {"flops": 4}  # of the largest number of a column; 3 of other kinds
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


@dataclass(frozen=True)
class Summary:
    """A number over the seeds that have it."""

    mean: float
    spread: float | None = None  # sample standard deviation; None with one seed


@dataclass(frozen=True)
class Unit:
    """Numbers of a column are divided by `factor` and written with so many decimals."""

    name: str
    factor: float = 1.0
    decimals: int | None = 2  # None: two digits of any number, over many orders of magnitude

    def titled(self, title: str) -> str:
        return f"{title} ({self.name})" if self.name else title

    def written(self, found: Summary | None) -> str:
        """`mean ± spread`; the mean alone where all seeds agree."""
        if found is None:
            return DASH
        mean, spread = found.mean / self.factor, (found.spread or 0.0) / self.factor
        if self.decimals is None:
            texts = f"{mean:.2g}", f"{spread:.1g}"
        else:
            texts = f"{mean:,.{self.decimals}f}", f"{spread:,.{self.decimals}f}"
        return " ± ".join(texts) if spread else texts[0]


@dataclass(frozen=True)
class Metric:
    """One column."""

    title: str
    kind: Kind
    read: Callable[[Run], float | None]
    better: Literal["low", "high"] | None = None
    ideal: Callable[[Run], float | None] | None = None  # written behind it: "7.9 of 8.3"


def best(field: str) -> Callable[[Run], float | None]:
    return lambda run: run.best.get(field)


def against_exact(field: str) -> Callable[[Run], float | None]:
    """For approximate routers only: one that scores every expert agrees with itself."""
    return lambda run: None if scores_every_expert(run) else run.best.get(field)


def scores_every_expert(run: Run) -> bool:
    return run.config["model"].get("router") == "topk"


def sees_future(run: Run) -> bool:
    """Whether experts choose tokens: then each token's routing depends on later ones."""
    model = run.config["model"]
    gate = (model.get("router_options") or {}).get("gate")
    return "expert_choice" in (model.get("router"), gate)


def most_entropy(run: Run) -> float | None:
    """ln E: every expert used equally."""
    experts = run.config["model"].get("num_experts")
    return math.log(experts) if experts and run.best.get("entropy") is not None else None


def perplexity_of_test(run: Run) -> float | None:
    return None if run.test is None else run.test["perplexity"]


PERPLEXITY = Metric("perplexity", "plain", best("perplexity"), "low")
TEST = Metric("perplexity, test text", "plain", perplexity_of_test, "low")
LOSS = Metric("loss, nats", "plain", best("loss"), "low")
FLOPS = Metric("FLOPs, algorithmic", "flops", best("flops"), "low")
EXECUTED = Metric("FLOPs, executed", "flops", best("executed_flops"), "low")
SECONDS = Metric("time", "seconds", best("seconds"), "low")
SPEED = Metric("tokens/s", "count", lambda run: run.tokens_per_second, "high")
MEMORY = Metric("peak memory (GiB)", "plain", lambda run: run.peak_memory_gib, "low")
TOTAL = Metric("parameters", "count", lambda run: run.parameters["total"])
ACTIVE = Metric("active", "count", lambda run: run.parameters["active"])
DEAD = Metric("dead experts", "share", best("dead_experts"), "low")
ENTROPY = Metric("entropy, nats", "plain", best("entropy"), "high", most_entropy)
OVERLAP = Metric("overlap", "plain", against_exact("overlap"), "high")
RECALL = Metric("mass recall", "plain", against_exact("mass_recall"), "high")
BOUND = Metric("its bound", "tiny", against_exact("mass_recall_bound"))

COSTS = (FLOPS, EXECUTED, SECONDS, SPEED, MEMORY)
PERPLEXITIES = (PERPLEXITY, TEST)
AGREEMENT = (OVERLAP, RECALL)  # with exact routing
USE = (DEAD, ENTROPY)
MOVED_BY_SEEDS = (*PERPLEXITIES, LOSS, *USE, *AGREEMENT)

# Suite -> its columns and caption; everything else is a comparison of methods.
OF_SUITE = {
    "ablations": ((*PERPLEXITIES, *COSTS, *USE, *AGREEMENT), "AIR without one of its parts."),
    "codebook": (
        (*AGREEMENT, BOUND, PERPLEXITY, *COSTS, DEAD),
        "Codewords G and shortlists of M experts.",
    ),
    "granularity": ((LOSS, *PERPLEXITIES, *COSTS, *USE), "Experts Q times as small."),
}
OF_METHODS = (
    (*PERPLEXITIES, *COSTS, TOTAL, ACTIVE, *USE, OVERLAP),
    "All methods at their lowest validation perplexity.",
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


def summarize(metric: Metric, runs: Sequence[Run]) -> Summary | None:
    """Mean and spread over seeds; None where no run has it."""
    values = [value for run in runs if (value := metric.read(run)) is not None]
    if not values:
        return None
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None)


def unit_of(kind: Kind, values: Sequence[float]) -> Unit:
    """One unit for a whole column or axis, so that its numbers compare at a glance."""
    largest = max((abs(value) for value in values), default=0.0)
    if kind == "share":
        return Unit("%", 0.01, 1)
    if kind in ("plain", "tiny"):
        return Unit("", decimals=2 if kind == "plain" else None)
    if kind == "seconds":
        units = (("h", 3600.0), ("min", 60.0))
        name, factor = next((one for one in units if largest >= 2 * one[1]), ("s", 1.0))
    else:
        power = min(int(math.log10(largest) // 3), len(PREFIXES) - 1) if largest >= 1 else 0
        name, factor = PREFIXES[power], 1000.0**power
    before = len(str(round(largest / factor)))
    return Unit(name, factor, max(DIGITS.get(kind, 3) - before, 0))


def group_table(group: Group) -> Table:
    """The table of a group, with the columns of its suite."""
    columns, caption = OF_SUITE.get(group.suite or "", OF_METHODS)
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
    unit = unit_of(metric.kind, list(means.values()))
    best = _best(metric, unit, means, group)
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


def _best(metric: Metric, unit: Unit, means: dict[str, float], group: Group) -> list[str]:
    """The variants with the best mean as printed; none where rows do not compare."""
    competing = {
        variant: runs
        for variant, runs in group.variants.items()
        if variant in means and _competes(metric, runs)
    }
    seeds = {frozenset(run.seed for run in runs) for runs in competing.values()}
    ideals = {metric.ideal and metric.ideal(runs[0]) for runs in competing.values()}
    is_moved = metric in MOVED_BY_SEEDS and len(seeds) > 1
    texts = {one: unit.written(Summary(means[one])) for one in competing}
    if metric.better is None or is_moved or len(ideals) > 1 or len(set(texts.values())) < 2:
        return []
    best = (min if metric.better == "low" else max)(competing, key=means.__getitem__)
    return [variant for variant, text in texts.items() if text == texts[best]]


def _notes(group: Group, shown: Sequence[Metric]) -> list[str]:
    notes = note_on_test(group.runs) if TEST in shown else []
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
    """What the test text is, if it comes from another source than the training text."""
    _, test = text_of(runs[0])
    return [f"Test text: {test}."] if test and summarize(TEST, runs) else []


def _competes(metric: Metric, runs: Sequence[Run]) -> bool:
    not_comparable = metric in PERPLEXITIES and sees_future(runs[0])
    collapsed = metric in AGREEMENT and is_collapsed(runs)
    return not is_reference(runs[0]) and not not_comparable and not collapsed


def is_collapsed(runs: Sequence[Run]) -> bool:
    """Whether, for any seed, too many experts are dead for the overlap to mean something."""
    return any((DEAD.read(run) or 0.0) > MOST_DEAD for run in runs)


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
