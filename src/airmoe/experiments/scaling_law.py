"""The law of granularity, L(Q) = a / Q^b + c (Eq. 3), fitted to the losses of a suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from airmoe.errors import ConfigError

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
        best = int(np.argmin([_linear(amounts, values, one).error for one in grid]))
        low, power, high = grid[max(best - 1, 0)], grid[best], grid[min(best + 1, GRID - 1)]
    found = _linear(amounts, values, float(power))
    return ScalingLaw(
        a=found.a,
        b=float(power),
        c=found.c,
        residual=float(np.sqrt(found.error / len(values))),
        points=len(values),
    )


@dataclass(frozen=True)
class _Linear:
    a: float
    c: float
    error: float  # sum of squares


def _linear(amounts: np.ndarray, values: np.ndarray, power: float) -> _Linear:
    """The best a, c >= 0 for this power: inside if that is allowed, else on one of the edges."""
    falling = amounts**-power
    spread = falling - falling.mean()
    a = float(spread @ (values - values.mean()) / (spread @ spread))
    inside = _candidate(falling, values, a, float(values.mean() - a * falling.mean()))
    if inside.a >= 0 and inside.c >= 0:
        return inside
    flat = _candidate(falling, values, 0.0, max(float(values.mean()), 0.0))
    no_floor = max(float(falling @ values / (falling @ falling)), 0.0)
    return min(flat, _candidate(falling, values, no_floor, 0.0), key=lambda one: one.error)


def _candidate(falling: np.ndarray, values: np.ndarray, a: float, c: float) -> _Linear:
    return _Linear(a, c, float(((a * falling + c - values) ** 2).sum()))
