"""Who is used: experts as a map (Fig. 4), all on one colour scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from airmoe.experiments.report.figures.drawing import (
    WIDTH,
    Drawing,
    label_of,
    matplotlib_style,
    plain_numbers,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.names import title_of
from airmoe.experiments.report.usage import ExpertMap, relative_usage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNUSED = "#e4e4e4"  # an expert without a token: a light grey, which the colour map lacks
FRINGE = 0.5  # per cent of experts at either end that may lie beyond the colour scale


def maps(group: Group) -> dict[str, ExpertMap]:
    """Variant -> the map of its first seed that has one; a few large experts make no picture."""
    return {
        variant: found[0]
        for variant, runs in group.variants.items()
        if runs[0].method != "coarse"
        and (found := [run.usage for run in runs if run.usage and run.usage.levels])
    }


def usage_figure(group: Group) -> list[Drawing]:
    found = maps(group)
    if not found:
        return []
    caption = (
        "Tokens per expert over the validation text, relative to the mean, on one log scale; "
        "light grey: none. PEER's experts by sub-keys, hierarchical ones by cluster (rows), the "
        "others in the order of their numbers. Above each map: the share of the variance of log "
        "counts that its rows and columns explain, in brackets that of shuffled experts. A router "
        "that couples experts shows stripes; a product of sub-keys gives 100 %."
    )
    thinned = [title_of(name) for name, one in found.items() if max(one.steps) > 1]
    if thinned:
        caption += f" Evenly spaced rows or columns only: {', '.join(thinned)}."
    shares = ", ".join(f"{title_of(name)} {_stripes(one)}" for name, one in found.items())
    alt = f"Maps of expert usage. Variance explained by rows and columns: {shares}."
    name = f"{group.slug}-usage"
    with matplotlib_style(name):
        return [Drawing(name, caption, alt, _draw_maps(found), wide=True)]


def _draw_maps(found: dict[str, ExpertMap]) -> Figure:
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    grids = {variant: relative_usage(one) for variant, one in found.items()}
    used = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    low, high = np.percentile(used, [FRINGE, 100 - FRINGE]) if used.size else (0.1, 10.0)
    scale = LogNorm(min(low, 0.5), max(high, 2.0))
    colours = matplotlib.colormaps["cividis"].with_extremes(bad=UNUSED)
    columns = 3 if len(grids) > 4 else min(2, len(grids))
    rows = math.ceil(len(grids) / columns)
    side = WIDTH / max(columns, 2)
    size = (side * columns, (side + 0.6) * rows + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    image = None
    for axes, (variant, grid) in zip(panels, grids.items(), strict=False):
        image = axes.imshow(grid, norm=scale, cmap=colours, aspect="auto", interpolation="none")
        axes.set_title(f"{label_of(variant)}\n{_stripes(found[variant])}", fontsize=10)
        axes.set_box_aspect(1)
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_yticks([])
        height, width = found[variant].shape
        axes.set_xlabel(f"{width} columns", fontsize=9)
        axes.set_ylabel(f"{height} rows", fontsize=9)
    for axes in panels[len(grids) :]:
        axes.set_visible(False)
    assert image is not None
    label = "tokens / mean tokens of an expert"
    bar = figure.colorbar(
        image, ax=list(panels), location="bottom", label=label, shrink=0.8, aspect=30
    )
    bar.ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain_numbers(bar.ax.xaxis)
    return figure


def _stripes(one: ExpertMap) -> str:
    if one.structure is None or one.structure_by_chance is None:
        return "no rows and columns"
    return f"stripes {100 * one.structure:.1f} % ({100 * one.structure_by_chance:.1f} %)"
