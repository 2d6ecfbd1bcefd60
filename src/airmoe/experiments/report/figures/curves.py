"""Lines over training: a line per variant, the mean of its seeds, a band as wide as they spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

import numpy as np

from airmoe.experiments.report.document import Picture
from airmoe.experiments.report.figures.drawing import (
    HEIGHT,
    WIDTH,
    Drawing,
    matplotlib_style,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.metrics import Kind, scores_every_expert, unit_of
from airmoe.experiments.report.names import Style, label_of, styles_of, title_of
from airmoe.experiments.report.record import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Source = Literal["evaluations", "training"]
BASELINE = "peer"
MANY_POINTS = 25  # markers then stand on some of them only


@dataclass(frozen=True)
class Series:
    """One variant's curve."""

    variant: str
    x: list[float]
    y: list[float]
    spread: list[float]  # sample standard deviation over seeds, 0 for one seed


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


def series(group: Group, x: str, y: str, source: Source = "evaluations") -> list[Series]:
    """The variants that have both fields, at the steps which all their seeds share."""
    found = []
    for variant, runs in group.variants.items():
        points = [_points(run, x, y, source) for run in runs]
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


def _points(run: Run, x: str, y: str, source: Source) -> dict[float, tuple[float, float]]:
    """step -> (x, y), where a line has both."""
    columns = run.evaluations if source == "evaluations" else run.training
    lines = zip(columns["step"], columns.get(x, []), columns.get(y, []), strict=False)
    return {
        step: (across, up)
        for step, across, up in lines
        if step is not None and across is not None and up is not None
    }


def perplexity_figures(group: Group) -> list[Drawing]:
    """Perplexity against FLOPs (both ledgers) and against time."""
    figures = []
    for horizontal in (FLOPS, EXECUTED, SECONDS):
        curves = series(group, horizontal.field, "perplexity")
        if curves:
            caption = f"Validation perplexity against {horizontal.label} (lower is better)."
            name = f"{group.slug}-perplexity-{horizontal.field.replace('_', '-')}"
            picture = Picture(name=name, caption=caption, alt=alt_text(caption, curves))
            figures.append(
                line_figure(picture, curves, horizontal, "validation perplexity", log=True)
            )
    return figures


def reduction_figure(group: Group) -> Drawing | None:
    """Fig. 2: how much lower than PEER's, at equal tokens.

    At equal FLOPs the runs would stand at different points of their learning-rate schedules.
    """
    variants = dict(group.variants)
    baseline = variants.pop(BASELINE, [])
    cuts = (reduction(variant, runs, baseline) for variant, runs in variants.items())
    found = [cut for cut in cuts if cut is not None]
    if not found:
        return None
    caption = (
        "Perplexity below PEER's with the same seed after as many tokens, in per cent "
        "(larger is better)."
    )
    picture = Picture(name=f"{group.slug}-reduction", caption=caption, alt=alt_text(caption, found))
    return line_figure(picture, found, TOKENS, "reduction against PEER (%)", zero=True)


def reduction(variant: str, runs: Sequence[Run], baseline: Sequence[Run]) -> Series | None:
    """100 (1 - ours / PEER's) of the seeds that both have, where both were evaluated.

    Runs with the same seed are pairs (they start and read alike), means over different ones not.
    Nor are runs whose balance losses follow different conventions: one is K times weaker.
    """
    theirs = {run.seed: run for run in baseline}
    pairs_of_runs = [(run, theirs[run.seed]) for run in runs if run.seed in theirs]
    found = (_cuts(*pair) for pair in pairs_of_runs if _same_convention(*pair))
    pairs = [cuts for cuts in found if cuts]
    shared = sorted(set.intersection(*map(set, pairs))) if pairs else []
    values = [[of_pair[tokens] for of_pair in pairs] for tokens in shared]
    return _over_seeds(variant, shared, values) if shared else None


def _same_convention(ours: Run, theirs: Run) -> bool:
    """Also where it makes no difference to one of them."""
    return len({ours.convention, theirs.convention} - {None}) < 2


def _cuts(ours: Run, theirs: Run) -> dict[float, float]:
    """Tokens -> per cent."""
    mine, others = (
        dict(_points(run, TOKENS.field, "perplexity", "evaluations").values())
        for run in (ours, theirs)
    )
    return {
        tokens: 100 * (1 - mine[tokens] / others[tokens]) for tokens in mine if tokens in others
    }


def quality_figures(group: Group) -> list[Drawing]:
    """Overlap, mass recall and its bound through training, of routers that approximate."""
    runs = [run for run in group.runs if not scores_every_expert(run)]
    approximate, figures = replace(group, runs=runs), []
    kinds: tuple[tuple[str, str, bool], ...] = (
        ("overlap", "overlap with exact routing", False),
        ("mass_recall", "mass recall", False),
        ("mass_recall_bound", "bound of the mass recall", True),
    )
    for field, label, log in kinds:
        curves = series(approximate, "tokens", field, "training")
        if curves:
            caption = f"{label[0].upper()}{label[1:]} through training, of a sample of tokens."
            name = f"{group.slug}-{field.replace('_', '-')}"
            picture = Picture(name=name, caption=caption, alt=alt_text(caption, curves))
            figures.append(line_figure(picture, curves, TOKENS, label, log=log, unit=not log))
    return figures


def line_figure(
    picture: Picture,
    curves: Sequence[Series],
    horizontal: Horizontal,
    label: str,
    *,
    log: bool = False,
    zero: bool = False,
    unit: bool = False,
) -> Drawing:
    """`log`: the y axis; `zero`: a line at 0; `unit`: y from 0 to 1."""
    with matplotlib_style(picture.name):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        scale = unit_of(horizontal.kind, [x for one in curves for x in one.x])
        styles = styles_of([one.variant for one in curves])
        for one in curves:
            _line(axes, one, styles[one.variant], scale.factor)
        if log:
            _log_axis(axes, [y for one in curves for y in one.y])
        if zero:
            axes.axhline(0, color="#444444", linewidth=1)
        if unit:
            axes.set_ylim(0, 1.02)
        axes.set_xlabel(f"{horizontal.label} ({scale.name})" if scale.name else horizontal.label)
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        legend(axes, len(curves))
        return Drawing(picture, figure)


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
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if min(values) <= 0:
        return
    axes.set_yscale("log")
    if max(values) / min(values) > 1e4 or min(values) < 1e-2:
        return
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, entries: int, columns: int | None = None) -> None:
    """Below the axes, so that it covers no line; long entries want fewer `columns`."""
    columns = columns or (3 if entries > 4 else 2)
    axes.figure.legend(loc="outside lower center", ncols=min(columns, entries), handlelength=3.5)


def alt_text(caption: str, curves: Sequence[Series]) -> str:
    """For those who cannot see it: the last value of every line."""
    ends = ", ".join(f"{title_of(one.variant)} {one.y[-1]:.4g}" for one in curves)
    return f"{caption} At the end: {ends}."
