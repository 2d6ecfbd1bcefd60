"""Lines over training: a line per variant, the mean of its seeds, a band as wide as they spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

import numpy as np

from airmoe.experiments.report.figures.drawing import (
    Drawing,
    Style,
    label_of,
    legend,
    matplotlib_style,
    new_plot,
    plain_numbers,
    styles_of,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.metrics import Kind, scores_every_expert, unit_of
from airmoe.experiments.report.names import title_of
from airmoe.experiments.report.record import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Source = Literal["evaluations", "training"]
BASELINE = "peer"
MANY_POINTS = 25  # markers then stand on some of them only


@dataclass(frozen=True)
class Horizontal:
    """What an x axis shows."""

    field: str
    label: str
    kind: Kind


FLOPS = Horizontal("flops", "training FLOPs, algorithmic", "flops")
EXECUTED = Horizontal("executed_flops", "training FLOPs, executed", "flops")
SECONDS = Horizontal("seconds", "time", "seconds")
TOKENS = Horizontal("tokens", "training tokens", "count")


@dataclass(frozen=True)
class Curves:
    """One figure: a field of the log over another."""

    name: str  # of its file, behind the group's
    field: str
    label: str
    caption: str
    across: Horizontal = TOKENS
    source: Source = "training"
    scale: Literal["log", "from 0", "0 to 1"] = "from 0"
    factor: float = 1.0
    approximate: bool = False  # only routers that approximate exact routing


def _perplexity(across: Horizontal) -> Curves:
    return Curves(
        f"perplexity-{across.field.replace('_', '-')}",
        "perplexity",
        "validation perplexity",
        f"Validation perplexity against {across.label} (lower is better).",
        across=across,
        source="evaluations",
        scale="log",
    )


def _quality(field: str, label: str, scale: Literal["log", "0 to 1"] = "0 to 1") -> Curves:
    caption = f"{label[0].upper()}{label[1:]} through training, of a sample of tokens."
    name = field.replace("_", "-")
    return Curves(name, field, label, caption, scale=scale, approximate=True)


PERPLEXITY = tuple(_perplexity(across) for across in (FLOPS, EXECUTED, SECONDS))
QUALITY = (
    _quality("overlap", "overlap with exact routing"),
    _quality("mass_recall", "mass recall"),
    _quality("mass_recall_bound", "bound of the mass recall", scale="log"),
)
HEALTH = (
    Curves(
        "dead-experts",
        "dead_experts",
        "dead experts (%)",
        "Experts without a token of the validation text, in per cent.",
        source="evaluations",
        factor=100.0,
    ),
    Curves(
        "unlisted-experts",
        "unlisted_experts",
        "unlisted experts (%)",
        "Experts that no shortlist holds, in per cent: no token can choose them.",
        source="evaluations",
        factor=100.0,
    ),
    Curves(
        "codeword-perplexity",
        "codeword_perplexity",
        "codewords in use",
        "Codewords (hierarchical: clusters) in use: how many, equally used, would be as even as "
        "those of one training step.",
    ),
    Curves(
        "staleness",
        "staleness",
        "stale shortlist entries (%)",
        "Entries of the shortlists that a rebuild would replace, in per cent. Lists that live "
        "several steps are of different age at the steps shown.",
        factor=100.0,
    ),
)
REDUCTION = Curves(
    "reduction",
    "perplexity",
    "reduction against PEER (%)",
    "Perplexity below PEER's with the same seed after as many tokens, in per cent (larger is "
    "better).",
    source="evaluations",
)


@dataclass(frozen=True)
class Series:
    """One variant's curve."""

    variant: str
    x: list[float]
    y: list[float]
    spread: list[float]  # sample standard deviation over seeds, 0 for one seed


def curve_figures(group: Group, shown: Sequence[Curves]) -> list[Drawing]:
    """Those of which some variant has the numbers."""
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
    columns = run.evaluations if shown.source == "evaluations" else run.training
    x, y = columns.get(shown.across.field, []), columns.get(shown.field, [])
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

    Runs with the same seed are pairs (they start and read alike), means over different ones not.
    """
    theirs = {run.seed: run for run in baseline}
    pairs = [_cuts(run, theirs[run.seed]) for run in runs if run.seed in theirs]
    pairs = [cuts for cuts in pairs if cuts]
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
    name, across = f"{group.slug}-{shown.name}", shown.across
    with matplotlib_style(name):
        figure, axes = new_plot()
        unit = unit_of(across.kind, [x for one in curves for x in one.x])
        styles = styles_of([one.variant for one in curves])
        for one in curves:
            _line(axes, one, styles[one.variant], unit.factor)
        if shown.scale == "log":
            _log_axis(axes, [y for one in curves for y in one.y])
        elif shown.scale == "from 0":
            axes.axhline(0, color="#444444", linewidth=1)
        else:
            axes.set_ylim(0, 1.02)
        axes.set_xlabel(f"{across.label} ({unit.name})" if unit.name else across.label)
        axes.set_ylabel(shown.label)
        axes.set_xlim(left=0)
        legend(axes, len(curves))
    ends = ", ".join(f"{title_of(one.variant)} {one.y[-1]:.4g}" for one in curves)
    return Drawing(name, shown.caption, f"{shown.caption} At the end: {ends}.", figure)


def _line(axes: Axes, one: Series, style: Style, factor: float) -> None:
    x, y, spread = np.array(one.x) / factor, np.array(one.y), np.array(one.spread)
    axes.plot(
        x,
        y,
        color=style.colour,
        linestyle=style.dashes,
        marker=style.marker,
        markevery=max(1, len(x) // MANY_POINTS),
        label=label_of(one.variant),
    )
    if spread.any():
        low = np.maximum(y - spread, y * 1e-3) if (y > 0).all() else y - spread
        axes.fill_between(x, low, y + spread, color=style.colour, alpha=0.15, linewidth=0)


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Plain numbers between the powers of ten where there are few of these; none for tiny ones."""
    from matplotlib.ticker import LogLocator

    if min(values) <= 0:
        return
    axes.set_yscale("log")
    if max(values) / min(values) > 1e4 or min(values) < 1e-2:
        return
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    plain_numbers(axes.yaxis)
