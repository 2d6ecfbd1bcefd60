"""Loss against granularity: the points, and the law that is fitted to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from airmoe.errors import ConfigError
from airmoe.experiments.report import metrics
from airmoe.experiments.report.figures.drawing import (
    HEIGHT,
    WIDTH,
    Drawing,
    legend,
    matplotlib_style,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.metrics import Summary, summarize
from airmoe.experiments.report.names import granularity_of, style_at
from airmoe.experiments.scaling_law import ScalingLaw, fit_scaling_law


@dataclass(frozen=True)
class Fit:
    """No law where there are too few points; what to say of it in any case."""

    law: ScalingLaw | None
    words: str


def losses(group: Group) -> dict[int, Summary]:
    """Granularity -> the lowest validation loss."""
    found = {}
    for variant, runs in group.variants.items():
        amount, loss = granularity_of(variant), summarize(metrics.LOSS, runs)
        if amount is not None and loss is not None:
            found[amount] = loss
    return found


def fitted(group: Group) -> Fit:
    """The law of Eq. 3 and what to say about it."""
    found = losses(group)
    try:
        law = fit_scaling_law(list(found), [one.mean for one in found.values()])
    except ConfigError as error:
        return Fit(None, f"No fit of L(Q) = a / Q^b + c: {error}")
    words = (
        f"Fit of L(Q) = a / Q^b + c to {law.points} points: a = {law.a:.4g}, b = {law.b:.4g}, "
        f"c = {law.c:.4g}; root mean square distance {law.residual:.2g} nats."
    )
    return Fit(law, " ".join([words, *law.warnings]))


def granularity_figure(group: Group, law: ScalingLaw | None) -> Drawing:
    """Losses with their spread, and the fitted curve."""
    found, name = losses(group), f"{group.slug}-law"
    with matplotlib_style(name):
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
            curve, style = [law.loss(amount) for amount in dense], style_at(1)
            axes.plot(dense, curve, color=style.colour, linestyle=style.dashes, label=label)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(amounts.tolist()))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("granularity Q (times as small as the coarse expert)")
        axes.set_ylabel("validation loss (nats per token)")
        legend(axes, 2)
    caption = "Lowest validation loss against granularity Q."
    ends = ", ".join(f"Q = {amount}: {one.mean:.4g}" for amount, one in found.items())
    return Drawing(name, caption, f"{caption} {ends}.", figure)
