"""Curves over training: a line per variant, the mean of its seeds, and a band of their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from airmoe.experiments.report.drawing import (
    Drawing,
    label_of,
    legend,
    matplotlib_style,
    new_plot,
    plain_numbers,
    styles_of,
)
from airmoe.experiments.report.groups import Group, title_of
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.tables import Kind, scores_every_expert, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "peer"
MANY_POINTS = 25  # with more, only some of them get markers
# What an x axis shows: field -> label, kind.
ACROSS: dict[str, tuple[str, Kind]] = {
    "flops": ("training FLOPs, algorithmic", "flops"),
    "executed_flops": ("training FLOPs, executed", "flops"),
    "seconds": ("time", "seconds"),
    "tokens": ("training tokens", "count"),
}


@dataclass(frozen=True)
class Curves:
    """One figure: a field of the log over another."""

    name: str  # of its file, behind the group's
    field: str
    label: str
    caption: str
    across: str = "tokens"
    log: Literal["evaluations", "training"] = "evaluations"
    is_logarithmic: bool = False
    factor: float = 1.0
    approximate: bool = False  # only routers that approximate exact routing


def _perplexity(across: str) -> Curves:
    name, label = f"perplexity-{across.replace('_', '-')}", "validation perplexity"
    caption = f"Validation perplexity against {ACROSS[across][0]} (lower is better)."
    return Curves(name, "perplexity", label, caption, across=across, is_logarithmic=True)


def _quality(field: str, label: str) -> Curves:
    name, caption = field.replace("_", "-"), f"{label} during training, on a sample of tokens."
    is_tiny = field == "mass_recall_bound"
    return Curves(
        name, field, label, caption, log="training", is_logarithmic=is_tiny, approximate=True
    )


def _share(field: str, caption: str, log: Literal["evaluations", "training"]) -> Curves:
    name, label = field.replace("_", "-"), f"{field.replace('_', ' ')} (%)"
    return Curves(name, field, label, caption, log=log, factor=100.0)


PERPLEXITY = tuple(map(_perplexity, ("flops", "executed_flops", "seconds")))
QUALITY = (
    _quality("overlap", "Overlap with exact routing"),
    _quality("mass_recall", "Mass recall"),
    _quality("mass_recall_bound", "Bound of the mass recall"),
)
HEALTH = (
    _share(
        "dead_experts",
        "Experts without a token of the validation text, in per cent.",
        "evaluations",
    ),
    _share(
        "unlisted_experts",
        "Experts that no shortlist holds, in per cent: no token can choose them.",
        "evaluations",
    ),
    Curves(
        "codeword-perplexity",
        "codeword_perplexity",
        "codewords in use",
        "Codewords (hierarchical: clusters) in use in a training step, as the perplexity of their "
        "usage.",
        log="training",
    ),
    _share(
        "staleness",
        "Shortlist entries that a rebuild would replace, in per cent. Lists that are kept for "
        "several steps have different ages at the steps shown.",
        "training",
    ),
)
REDUCTION = Curves(
    "reduction",
    "perplexity",
    "reduction against PEER (%)",
    "How far perplexity is below PEER's with the same seed after the same number of tokens, in per "
    "cent (larger is better).",
)


@dataclass(frozen=True)
class Series:
    """One variant's curve."""

    variant: str
    x: list[float]
    y: list[float]
    spread: list[float]  # sample standard deviation over seeds, 0 for one seed


def curve_figures(group: Group, shown: Sequence[Curves]) -> list[Drawing]:
    """A figure for each of these that some variant has numbers for."""
    figures = []
    for one in shown:
        runs = [run for run in group.runs if not (one.approximate and scores_every_expert(run))]
        if found := series(replace(group, runs=runs), one):
            figures.append(_draw(group, one, found))
    return figures


def series(group: Group, shown: Curves) -> list[Series]:
    """The variants that have both fields, at the steps which all their seeds share."""
    found = []
    for variant, runs in group.variants.items():
        points = [_points(run, shown) for run in runs]
        steps = sorted(set.intersection(*(set(of_run) for of_run in points)))
        if steps:
            across = [fmean(of_run[step][0] for of_run in points) for step in steps]
            values = [[of_run[step][1] for of_run in points] for step in steps]
            found.append(_over_seeds(variant, across, values))
    return found


def _over_seeds(variant: str, x: list[float], values: list[list[float]]) -> Series:
    """`values` are those of all seeds, for every x."""
    spreads = [stdev(at_x) if len(at_x) > 1 else 0.0 for at_x in values]
    return Series(variant, x, [fmean(at_x) for at_x in values], spreads)


def _points(run: Run, shown: Curves) -> dict[float, tuple[float, float]]:
    """step -> (x, y), where a line has both."""
    columns = run.evaluations if shown.log == "evaluations" else run.training
    x, y = columns.get(shown.across, []), columns.get(shown.field, [])
    return {
        step: (across, shown.factor * up)
        for step, across, up in zip(columns["step"], x, y, strict=False)
        if step is not None and across is not None and up is not None
    }


def reduction_figure(group: Group) -> list[Drawing]:
    """Fig. 2: how much lower than PEER's, at equal tokens.

    At equal FLOPs the runs would stand at different points of their learning-rate schedules.
    """
    variants = dict(group.variants)
    baseline = variants.pop(BASELINE, [])
    cuts = (reduction(variant, runs, baseline) for variant, runs in variants.items())
    found = [cut for cut in cuts if cut is not None]
    return [_draw(group, REDUCTION, found)] if found else []


def reduction(variant: str, runs: Sequence[Run], baseline: Sequence[Run]) -> Series | None:
    """100 (1 - ours / PEER's) of the seeds that both have, where both were evaluated.

    Only runs with the same seed start from the same weights and read the same text.
    """
    theirs = {run.seed: run for run in baseline}
    pairs = [_cuts(run, theirs[run.seed]) for run in runs if run.seed in theirs]
    shared = sorted(set.intersection(*map(set, pairs))) if pairs else []
    values = [[of_pair[tokens] for of_pair in pairs] for tokens in shared]
    return _over_seeds(variant, shared, values) if shared else None


def _cuts(ours: Run, theirs: Run) -> dict[float, float]:
    """Tokens -> per cent."""
    mine, others = (dict(_points(run, REDUCTION).values()) for run in (ours, theirs))
    return {
        tokens: 100 * (1 - mine[tokens] / others[tokens]) for tokens in mine if tokens in others
    }


def _draw(group: Group, shown: Curves, curves: Sequence[Series]) -> Drawing:
    name = f"{group.slug}-{shown.name}"
    label, kind = ACROSS[shown.across]
    with matplotlib_style(name):
        figure, axes = new_plot()
        unit = unit_of(kind, [x for one in curves for x in one.x])
        styles = styles_of([one.variant for one in curves])
        for one in curves:
            _line(axes, one, styles[one.variant], unit.factor)
        if shown.is_logarithmic:
            _log_axis(axes, [y for one in curves for y in one.y])
        else:
            axes.axhline(0, color="#444444", linewidth=1)
        axes.set(xlabel=unit.titled(label), ylabel=shown.label, xlim=(0, None))
        legend(axes, len(curves))
    ends = ", ".join(f"{title_of(one.variant)} {one.y[-1]:.4g}" for one in curves)
    return Drawing(name, shown.caption, f"{shown.caption} At the end: {ends}.", figure)


def _line(axes: Axes, one: Series, style: dict[str, Any], factor: float) -> None:
    x, y, spread = np.array(one.x) / factor, np.array(one.y), np.array(one.spread)
    sparse = max(1, len(x) // MANY_POINTS)
    axes.plot(x, y, **style, markevery=sparse, label=label_of(one.variant))
    if spread.any():
        axes.fill_between(x, y - spread, y + spread, color=style["color"], alpha=0.15, linewidth=0)


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Plain numbers between the powers of ten where there are few of these; none for tiny ones."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", nonpositive="clip")
    if max(values) < 1e4 * min(values) and min(values) > 1e-2:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        plain_numbers(axes.yaxis)
