"""Loss against granularity: the law L(Q) = a / Q^b + c (Eq. 3), its fit and its figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from airmoe.errors import ConfigError
from airmoe.experiments.report import metrics
from airmoe.experiments.report.figures.drawing import (
    Drawing,
    legend,
    matplotlib_style,
    new_plot,
    plain_numbers,
    style_at,
)
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.metrics import Summary, summarize
from airmoe.experiments.report.names import granularity_of

SMALLEST_POWER, LARGEST_POWER = 1e-3, 10.0
GRID = 400  # powers tried, first in the whole range, then between the neighbours of the best
REFINEMENTS = 5
CONSTANTS = 3


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """The constants, how far the points lie from the curve, and what the fit is worth."""

    a: float
    b: float
    c: float
    residual: float  # root mean square, in the unit of the losses
    points: int

    def loss(self, granularity: float) -> float:
        return self.a / granularity**self.b + self.c

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons not to believe it, each a sentence."""
        found = []
        if self.points <= CONSTANTS:
            found.append(
                f"{self.points} points for {CONSTANTS} constants: a good fit says nothing about "
                "the law."
            )
        if self.a == 0:
            found.append("The loss does not fall with Q: a = 0, and b means nothing.")
        elif not 1.01 * SMALLEST_POWER < self.b < 0.99 * LARGEST_POWER:
            found.append("b is at the end of the range searched: the points do not determine it.")
        elif self.c == 0:
            found.append("c is at its limit 0: the points show no floor.")
        return tuple(found)


def fit_scaling_law(granularities: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """Least squares with a, b, c >= 0: for a given b linear in a and c, so b alone is searched."""
    amounts, values = np.asarray(granularities, float), np.asarray(losses, float)
    if amounts.shape != values.shape or len(set(amounts.tolist())) < CONSTANTS:
        raise ConfigError(
            "granularity",
            list(granularities),
            f"must be at least {CONSTANTS} different values with one loss each, because the law "
            f"has {CONSTANTS} constants",
            "Add runs.",
        )
    if not (np.isfinite(values).all() and (amounts > 0).all()):
        raise ConfigError("granularity", list(losses), "must have finite losses", "Leave it out.")
    low, high, power = SMALLEST_POWER, LARGEST_POWER, SMALLEST_POWER
    for _ in range(REFINEMENTS):
        grid = np.geomspace(low, high, GRID)
        best = int(np.argmin([_linear(amounts, values, one)[0] for one in grid]))
        low, power, high = grid[max(best - 1, 0)], grid[best], grid[min(best + 1, GRID - 1)]
    error, a, c = _linear(amounts, values, float(power))
    residual = float(np.sqrt(error / len(values)))
    return ScalingLaw(a=a, b=float(power), c=c, residual=residual, points=len(values))


def _linear(amounts: np.ndarray, values: np.ndarray, power: float) -> tuple[float, float, float]:
    """Squared error, a and c of the best a, c >= 0: inside if allowed, else on an edge."""
    falling = amounts**-power
    spread = falling - falling.mean()
    slope = spread @ (values - values.mean()) / (spread @ spread)
    found = [
        (slope, values.mean() - slope * falling.mean()),
        (0.0, max(values.mean(), 0.0)),
        (max(falling @ values / (falling @ falling), 0.0), 0.0),
    ]
    return min(
        (float(((a * falling + c - values) ** 2).sum()), float(a), float(c))
        for a, c in found
        if a >= 0 and c >= 0
    )


@dataclass(frozen=True)
class Fit:
    """No law where there are too few points; what to say of it in any case."""

    law: ScalingLaw | None
    words: str


def fitted(group: Group) -> Fit:
    """The law of a group's losses."""
    found = _losses(group)
    try:
        law = fit_scaling_law(list(found), [one.mean for one in found.values()])
    except ConfigError as error:
        return Fit(None, f"No fit of L(Q) = a / Q^b + c: {error}")
    words = (
        f"Fit of L(Q) = a / Q^b + c to {law.points} points: a = {law.a:.4g}, b = {law.b:.4g}, "
        f"c = {law.c:.4g}; root mean square distance {law.residual:.2g} nats."
    )
    return Fit(law, " ".join([words, *law.warnings]))


def _losses(group: Group) -> dict[int, Summary]:
    """Granularity -> the lowest validation loss."""
    found = {}
    for variant, runs in group.variants.items():
        amount, loss = granularity_of(variant), summarize(metrics.LOSS, runs)
        if amount is not None and loss is not None:
            found[amount] = loss
    return found


def granularity_figure(group: Group, law: ScalingLaw | None) -> Drawing:
    """Losses with their spread, and the fitted curve."""
    found, name = _losses(group), f"{group.slug}-law"
    with matplotlib_style(name):
        from matplotlib.ticker import FixedLocator, NullLocator

        figure, axes = new_plot()
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
        plain_numbers(axes.xaxis)
        axes.set_xlabel("granularity Q (times as small as the coarse expert)")
        axes.set_ylabel("validation loss (nats per token)")
        legend(axes, 2)
    caption = "Lowest validation loss against granularity Q."
    ends = ", ".join(f"Q = {amount}: {one.mean:.4g}" for amount, one in found.items())
    return Drawing(name, caption, f"{caption} {ends}.", figure)
