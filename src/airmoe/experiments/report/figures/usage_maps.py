"""Who is used: experts as a map (Fig. 4), all on one colour scale, and codewords by rank."""

from __future__ import annotations

import math

import numpy as np

from airmoe.experiments.report.document import Picture
from airmoe.experiments.report.figures.curves import legend
from airmoe.experiments.report.figures.drawing import (
    HEIGHT,
    WIDTH,
    Drawing,
    matplotlib_style,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.names import label_of, styles_of, title_of
from airmoe.experiments.report.usage import CellUsage, ExpertMap, relative_usage

UNUSED = "#e4e4e4"  # an expert without a token: a light grey, which the colour map lacks
FRINGE = 0.5  # per cent of experts at either end that may lie beyond the colour scale


def maps(group: Group) -> dict[str, ExpertMap]:
    """Variant -> the map of its first seed that has one; a few large experts make no picture."""
    return {
        variant: found[0]
        for variant, runs in group.variants.items()
        if runs[0].method != "coarse"
        and (found := [run.usage.experts for run in runs if run.usage and run.usage.experts.levels])
    }


def usage_figure(group: Group) -> Drawing | None:
    found = maps(group)
    if not found:
        return None
    caption = (
        "Tokens per expert over the validation text, relative to the mean, on one log scale; "
        "light grey: none. PEER's experts by sub-keys, hierarchical ones by cluster (rows), the "
        "others in the order of their numbers."
    )
    thinned = [title_of(name) for name, one in found.items() if max(one.steps) > 1]
    if thinned:
        caption += f" Evenly spaced rows or columns only: {', '.join(thinned)}."
    shares = ", ".join(f"{title_of(name)} {_share(one)}" for name, one in found.items())
    alt = f"Maps of expert usage. Variance explained by rows and columns: {shares}."
    picture = Picture(name=f"{group.slug}-usage", caption=caption, alt=alt, wide=True)
    with matplotlib_style(picture.name):
        return _draw_maps(found, picture)


def _draw_maps(found: dict[str, ExpertMap], picture: Picture) -> Drawing:
    import matplotlib
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

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
        axes.set_title(f"{label_of(variant)}\n{_share(found[variant])}", fontsize=10)
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
    figure.colorbar(image, ax=list(panels), location="bottom", label=label, shrink=0.8, aspect=30)
    return Drawing(picture, figure)


def _share(one: ExpertMap) -> str:
    if one.structure is None:
        return "nothing to explain"
    return f"{100 * one.structure:.1f} % explained"


def codewords(group: Group) -> dict[str, CellUsage]:
    """Variant -> codeword (or cluster) usage of its first seed that has one."""
    return {
        variant: found[0]
        for variant, runs in group.variants.items()
        if (found := [run.usage.cells for run in runs if run.usage and run.usage.cells])
    }


def codeword_figure(group: Group) -> Drawing | None:
    found = codewords(group)
    if not found:
        return None
    caption = (
        "Codewords (hierarchical: clusters) from the busiest down, with their share of the "
        "validation tokens; in brackets how many, equally used, would be as even."
    )
    ends = ", ".join(f"{title_of(name)} {one.perplexity:.4g}" for name, one in found.items())
    alt = f"Usage of codewords by rank. Perplexity of usage: {ends}."
    picture = Picture(name=f"{group.slug}-codewords", caption=caption, alt=alt)
    with matplotlib_style(picture.name):
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, NullFormatter

        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        styles = styles_of(list(found))
        for variant, one in found.items():
            style = styles[variant]
            shares = 100 * np.array(one.shares)
            axes.plot(
                one.ranks,
                np.where(shares > 0, shares, np.nan),
                color=style.colour,
                linestyle=style.dashes,
                marker=style.marker,
                markevery=max(1, len(one.ranks) // 8),
                label=f"{label_of(variant)} ({one.perplexity:.0f} of {one.total})",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(0.9, 1.1 * max(one.total for one in found.values()))
        axes.set_xlabel("rank of the codeword")
        axes.set_ylabel("share of tokens (%)")
        legend(axes, len(found), columns=2)
        return Drawing(picture, figure)
