"""Figures of the suites that turn one knob: granularity, and codewords x shortlists."""

from __future__ import annotations

import numpy as np

from airmoe.experiments.report import metrics
from airmoe.experiments.report.document import Picture
from airmoe.experiments.report.figures.curves import legend
from airmoe.experiments.report.figures.drawing import (
    HEIGHT,
    WIDTH,
    Drawing,
    matplotlib_style,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.metrics import Metric, Summary, summarize, unit_of
from airmoe.experiments.report.names import codebook_of, granularity_of, style_at
from airmoe.experiments.scaling_law import ScalingLaw

SWEPT: tuple[Metric, ...] = (
    metrics.OVERLAP,
    metrics.RECALL,
    metrics.BOUND,
    metrics.PERPLEXITY,
    metrics.FLOPS,
    metrics.SECONDS,
)


def losses(group: Group) -> dict[int, Summary]:
    """Granularity -> the lowest validation loss."""
    found = {}
    for variant, runs in group.variants.items():
        amount, loss = granularity_of(variant), summarize(metrics.LOSS, runs)
        if amount is not None and loss is not None:
            found[amount] = loss
    return found


def granularity_figure(group: Group, law: ScalingLaw | None) -> Drawing:
    """Losses with their spread, and the fitted curve."""
    found = losses(group)
    caption = "Lowest validation loss against granularity Q."
    ends = ", ".join(f"Q = {amount}: {one.mean:.4g}" for amount, one in found.items())
    picture = Picture(name=f"{group.slug}-law", caption=caption, alt=f"{caption} {ends}.")
    with matplotlib_style(picture.name):
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        amounts = np.array(list(found), float)
        axes.errorbar(
            amounts,
            [one.mean for one in found.values()],
            [one.spread or 0.0 for one in found.values()],
            color=style_at(0).colour,
            marker=style_at(0).marker,
            linestyle="none",
            capsize=3,
            label="runs (mean ± spread)",
        )
        if law is not None:
            dense = np.geomspace(amounts.min(), amounts.max(), 100)
            label = f"{law.a:.3g} / Q^{law.b:.3g} + {law.c:.3g}"
            curve = [law.loss(amount) for amount in dense]
            style = style_at(1)
            axes.plot(dense, curve, color=style.colour, linestyle=style.dashes, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(amounts.tolist()))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("granularity Q (times as small as the coarse expert)")
        axes.set_ylabel("validation loss (nats per token)")
        legend(axes, 2)
        return Drawing(picture, figure)


def codebook_figure(group: Group) -> Drawing:
    """A panel per quantity over the shortlist size, a line per codebook size."""
    lines = _lines(group)
    caption = "What codewords G and shortlists M buy and cost, at the lowest perplexity."
    alt = f"{caption} {len(group.variants)} settings; the table has the numbers."
    picture = Picture(name=f"{group.slug}-codebook", caption=caption, alt=alt, wide=True)
    with matplotlib_style(picture.name):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, 2.1 * len(SWEPT) / 2 + 0.8), layout="constrained")
        panels = figure.subplots(len(SWEPT) // 2, 2, sharex=True)
        for axes, metric in zip(panels.ravel(), SWEPT, strict=True):
            _panel(axes, metric, group, lines)
        for axes in panels[-1]:
            axes.set_xlabel("shortlist size M")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, handlelength=3.5)
        return Drawing(picture, figure)


def _lines(group: Group) -> dict[str, dict[int, str]]:
    """Label of a line -> shortlist size -> variant."""
    lines: dict[str, dict[int, str]] = {}
    for variant in group.variants:
        book = codebook_of(variant)
        if book is not None:
            label = f"G = {book.num_codewords}"
            lines.setdefault(label, {})[book.shortlist_size] = variant
    return lines


def _panel(axes, metric: Metric, group: Group, lines: dict[str, dict[int, str]]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = {name: summarize(metric, runs) for name, runs in group.variants.items()}
    unit = unit_of(metric.kind, [one.mean for one in found.values() if one is not None])
    for index, (label, line) in enumerate(lines.items()):
        means = [found[variant] for variant in line.values()]
        style = style_at(index)
        axes.plot(
            list(line),
            [np.nan if one is None else one.mean / unit.factor for one in means],
            color=style.colour,
            linestyle=style.dashes,
            marker=style.marker,
            label=label,
        )
    axes.set_xscale("log")
    sizes = sorted({size for line in lines.values() for size in line})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if metric.kind == "tiny" and all(one is None or one.mean > 0 for one in found.values()):
        axes.set_yscale("log")
    title = "bound of mass recall" if metric is metrics.BOUND else metric.title
    title = title.replace(" at minimum, algorithmic", "").replace(" at minimum", "")
    axes.set_title(f"{title} ({unit.name})" if unit.name else title, fontsize=10)
