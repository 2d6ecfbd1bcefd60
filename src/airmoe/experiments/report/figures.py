"""The figures of a group: curves over training, the granularity fit, maps of expert usage.

A curve is a line per variant, the mean of its seeds, and a band of their spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from airmoe.experiments.report.drawing import (
    STYLE,
    WIDTH,
    Drawing,
    label_of,
    legend,
    new_plot,
    plain_numbers,
    styles_of,
)
from airmoe.experiments.report.granularity import law_of, losses_of
from airmoe.experiments.report.groups import Group, title_of
from airmoe.experiments.report.record import ExpertMap, Run
from airmoe.experiments.report.tables import Kind, scores_every_expert, unit_of
from airmoe.experiments.report.usage import maps, relative_usage, steps_of, structure_by_chance

BASELINE = "peer"
MANY_POINTS = 25  # with more, only some of them get markers
# What an x axis shows: field -> label, kind.
ACROSS: dict[str, tuple[str, Kind]] = {
    "flops": ("training FLOPs, algorithmic", "flops"),
    "executed_flops": ("training FLOPs, executed", "flops"),
    "seconds": ("time", "seconds"),
    "tokens": ("training tokens", "count"),
}
UNUSED = "#e4e4e4"  # an expert without a token: a light grey, which the colour map lacks
FRINGE = 0.5  # per cent of experts at either end that may lie beyond the colour scale
MAPS_CAPTION = (
    "Tokens per expert over the validation text, relative to the mean, on one log scale; light "
    "grey: none. PEER's experts are arranged by sub-keys, hierarchical ones by cluster (rows), the "
    "others by number. Above each map: the share of the variance of log counts that rows and "
    "columns explain, and in brackets that of shuffled experts. A router that couples experts "
    "shows stripes; a product of sub-keys gives 100 %."
)
Points = dict[float, tuple[float, float]]  # tokens -> (x, y)


@dataclass(frozen=True)
class Curves:
    """One figure: a field of the log over another."""

    field: str
    label: str
    caption: str
    across: str = "tokens"
    log: Literal["evaluations", "training"] = "evaluations"
    is_logarithmic: bool = False
    factor: float = 1.0
    approximate: bool = False  # only routers that approximate exact routing

    @property
    def name(self) -> str:
        """The end of its file's name, after the group's."""
        across = "" if self.across == "tokens" else f"-{self.across}"
        return (self.field + across).replace("_", "-")


PERPLEXITY = tuple(
    Curves(
        "perplexity",
        "validation perplexity",
        f"Validation perplexity against {ACROSS[across][0]} (lower is better).",
        across=across,
        is_logarithmic=True,
    )
    for across in ("flops", "executed_flops", "seconds")
)
# Fig. 2. At equal FLOPs the runs would be at different points of their learning-rate schedules.
REDUCTION = Curves(
    "reduction",
    "reduction against PEER (%)",
    "How far perplexity is below PEER's with the same seed after the same number of tokens, in per "
    "cent (larger is better).",
)
QUALITY = tuple(
    Curves(
        field,
        label,
        f"{label} during training, on a sample of tokens.",
        log="training",
        is_logarithmic=field == "mass_recall_bound",
        approximate=True,
    )
    for field, label in (
        ("overlap", "Overlap with exact routing"),
        ("mass_recall", "Mass recall"),
        ("mass_recall_bound", "Bound of the mass recall"),
    )
)
HEALTH = (
    Curves(
        "dead_experts",
        "dead experts (%)",
        "Experts without a token of the validation text, in per cent.",
        factor=100.0,
    ),
    Curves(
        "unlisted_experts",
        "unlisted experts (%)",
        "Experts that no shortlist holds, in per cent: no token can choose them.",
        factor=100.0,
    ),
    Curves(
        "codeword_perplexity",
        "codewords in use",
        "Codewords (hierarchical: clusters) in use in a training step, as the perplexity of their "
        "usage.",
        log="training",
    ),
    Curves(
        "staleness",
        "staleness (%)",
        "Shortlist entries that a rebuild would replace, in per cent. Lists that are kept for "
        "several steps have different ages at the steps shown.",
        log="training",
        factor=100.0,
    ),
)


@dataclass(frozen=True)
class Series:
    """One variant's curve."""

    variant: str
    x: list[float]
    y: list[float]
    spread: list[float]  # sample standard deviation over seeds, 0 for one seed


@rc_context(STYLE)
def figures_of(group: Group) -> dict[str, list[Drawing]]:
    """Heading -> the figures under it."""
    if group.is_sweep:
        figures = [*granularity_figure(group), *curve_figures(group, PERPLEXITY)]
        return {"Granularity": figures}
    parts = {
        "Perplexity through training": curve_figures(group, (*PERPLEXITY, REDUCTION)),
        "Expert usage": usage_figure(group),
        "Against exact routing": curve_figures(group, QUALITY),
        "Router health": curve_figures(group, HEALTH),
    }
    return {title: drawings for title, drawings in parts.items() if drawings}


def curve_figures(group: Group, shown: Sequence[Curves]) -> list[Drawing]:
    """A figure for each of these that some variant has numbers for."""
    return [_draw(group, one, found) for one in shown if (found := series(group, one))]


def series(group: Group, shown: Curves) -> list[Series]:
    """A curve per variant that has the numbers, at the points that all its seeds share."""
    found = []
    for variant, runs in group.variants.items():
        if shown == REDUCTION:
            points = _reductions(runs, group.variants.get(BASELINE, []))
        else:
            points = [_points(run, shown) for run in runs]
        shared = sorted(set.intersection(*map(set, points))) if points else []
        if shared:
            x = [fmean(of_run[tokens][0] for of_run in points) for tokens in shared]
            values = [[of_run[tokens][1] for of_run in points] for tokens in shared]
            spread = [stdev(seeds) if len(seeds) > 1 else 0.0 for seeds in values]
            found.append(Series(variant, x, [fmean(seeds) for seeds in values], spread))
    return found


def _points(run: Run, shown: Curves) -> Points:
    """The points of a run, from the log lines that have both fields."""
    if shown.approximate and scores_every_expert(run):
        return {}
    log = run.evaluations if shown.log == "evaluations" else run.training
    columns = (log.get(name, []) for name in ("tokens", shown.across, shown.field))
    return {
        tokens: (x, shown.factor * y)
        for tokens, x, y in zip(*columns, strict=False)
        if tokens is not None and x is not None and y is not None
    }


def _reductions(runs: Sequence[Run], baseline: Sequence[Run]) -> list[Points]:
    """100 (1 - ours / PEER's) of each seed that both have, where both were evaluated.

    Only runs with the same seed start from the same weights and read the same text.
    """
    perplexity = replace(PERPLEXITY[0], across="tokens")
    theirs = {run.seed: _points(run, perplexity) for run in baseline if baseline is not runs}
    found = []
    for run in runs:
        if run.seed in theirs:
            mine, other = _points(run, perplexity), theirs[run.seed]
            both = [at for at in mine if at in other and other[at][1] > 0]
            found.append({at: (at, 100 * (1 - mine[at][1] / other[at][1])) for at in both})
    return found


def _draw(group: Group, shown: Curves, curves: Sequence[Series]) -> Drawing:
    name = f"{group.slug}-{shown.name}"
    label, kind = ACROSS[shown.across]
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
    """Plain numbers between powers of ten if there are few of these and none is tiny."""
    axes.set_yscale("log", nonpositive="clip")
    if max(values) < 1e4 * min(values) and min(values) > 1e-2:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        plain_numbers(axes.yaxis)


def granularity_figure(group: Group) -> list[Drawing]:
    """Losses with their spread, and the fitted curve."""
    found, name = losses_of(group), f"{group.slug}-law"
    if not found:
        return []
    figure, axes = new_plot()
    means = [one.mean for one in found.values()]
    spreads = [one.spread or 0.0 for one in found.values()]
    axes.errorbar(list(found), means, spreads, fmt="o", capsize=3, label="runs (mean ± spread)")
    if (law := law_of(found)) is not None:
        dense = np.geomspace(min(found), max(found), 100)
        label = f"{law.a:.3g} / Q^{law.b:.3g} + {law.c:.3g}"
        axes.plot(dense, law.loss(dense), "--", label=label)
    axes.set_xscale("log")
    axes.set_xticks(list(found), map(str, found))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("granularity Q (times as small as the coarse expert)")
    axes.set_ylabel("validation loss (nats per token)")
    legend(axes, 2)
    caption = "Lowest validation loss against granularity Q."
    ends = ", ".join(f"Q = {amount}: {one.mean:.4g}" for amount, one in found.items())
    return [Drawing(name, caption, f"{caption} {ends}.", figure)]


def usage_figure(group: Group) -> list[Drawing]:
    found = maps(group)
    if not found:
        return []
    caption = MAPS_CAPTION
    if thinned := [title_of(name) for name, one in found.items() if max(steps_of(one.shape)) > 1]:
        caption += f" Only evenly spaced rows or columns are shown of {', '.join(thinned)}."
    shares = ", ".join(f"{title_of(name)} {_stripes(one)}" for name, one in found.items())
    alt = f"Maps of expert usage. Variance explained by rows and columns: {shares}."
    name = f"{group.slug}-usage"
    return [Drawing(name, caption, alt, _draw_maps(found), wide=True)]


def _draw_maps(found: dict[str, ExpertMap]) -> Figure:
    grids = {variant: relative_usage(one) for variant, one in found.items()}
    used = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    low, high = np.percentile(used, [FRINGE, 100 - FRINGE]) if used.size else (0.1, 10.0)
    scale = LogNorm(min(low, 0.5), max(high, 2.0))
    colours = colormaps["cividis"].with_extremes(bad=UNUSED)
    columns = 3 if len(grids) > 4 else min(2, len(grids))
    rows = math.ceil(len(grids) / columns)
    side = WIDTH / max(columns, 2)
    size = (side * columns, (side + 0.6) * rows + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (variant, grid) in zip(panels, grids.items(), strict=False):
        axes.imshow(grid, norm=scale, cmap=colours, aspect="auto", interpolation="none")
        axes.set_title(f"{label_of(variant)}\n{_stripes(found[variant])}", fontsize=10)
        axes.grid(visible=False)
        axes.set(box_aspect=1, xticks=[], yticks=[])
        height, width = found[variant].shape
        axes.set_xlabel(f"{width} columns", fontsize=9)
        axes.set_ylabel(f"{height} rows", fontsize=9)
    for axes in panels[len(grids) :]:
        axes.set_visible(False)
    label = "tokens / mean tokens of an expert"
    bar = figure.colorbar(
        ScalarMappable(scale, colours),
        ax=list(panels),
        location="bottom",
        label=label,
        shrink=0.8,
        aspect=30,
    )
    bar.ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain_numbers(bar.ax.xaxis)
    return figure


def _stripes(one: ExpertMap) -> str:
    if one.structure is None:
        return "no rows and columns"
    return f"stripes {100 * one.structure:.1f} % ({100 * structure_by_chance(one):.1f} %)"
