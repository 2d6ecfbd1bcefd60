"""Loss against granularity: the law L(Q) = a / Q^b + c (Eq. 3), and its fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from airmoe.experiments.report.groups import Group, granularity_of
from airmoe.experiments.report.tables import LOSS, Summary, summarize

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

    def loss(self, granularity: np.ndarray) -> np.ndarray:
        return self.a / granularity**self.b + self.c

    @property
    def warnings(self) -> list[str]:
        """Reasons not to believe it, each a sentence."""
        found = []
        if self.points <= CONSTANTS:
            few = f"{self.points} points for {CONSTANTS} constants"
            found.append(f"{few}: a good fit says nothing about the law.")
        inside = 1.01 * SMALLEST_POWER < self.b < 0.99 * LARGEST_POWER
        if not (inside and self.a and self.c):
            found.append("A constant is at the end of its range: the points do not determine it.")
        return found


def fit_scaling_law(granularities: Sequence[float], losses: Sequence[float]) -> ScalingLaw | None:
    """Least squares with a, b, c >= 0: for a given b linear in a and c, so b alone is searched.

    None where there are fewer different granularities than constants.
    """
    amounts, values = np.asarray(granularities, float), np.asarray(losses, float)
    if len(set(granularities)) < CONSTANTS:
        return None
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


def fit_in_words(group: Group) -> str | None:
    """The fit of a sweep, and what it is worth."""
    if not group.is_sweep:
        return None
    law = law_of(losses_of(group))
    if law is None:
        return f"No fit of L(Q) = a / Q^b + c: it needs {CONSTANTS} granularities."
    words = (
        f"Fit of L(Q) = a / Q^b + c to {law.points} points: a = {law.a:.4g}, b = {law.b:.4g}, "
        f"c = {law.c:.4g}; root mean square distance {law.residual:.2g} nats."
    )
    return " ".join([words, *law.warnings])


def losses_of(group: Group) -> dict[int, Summary]:
    """Granularity -> the lowest validation loss."""
    found = {granularity_of(name): summarize(LOSS, runs) for name, runs in group.variants.items()}
    return {amount: loss for amount, loss in found.items() if amount and loss}


def law_of(found: dict[int, Summary]) -> ScalingLaw | None:
    return fit_scaling_law(list(found), [one.mean for one in found.values()])
