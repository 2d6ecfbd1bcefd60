"""L(Q) = a / Q^b + c: exact data gives its constants back, and doubtful fits say so."""

from __future__ import annotations

import numpy as np
import pytest

from airmoe import ConfigError
from airmoe.experiments.report.figures.granularity import fit_scaling_law


@pytest.mark.parametrize(("a", "b", "c"), [(1.2, 0.5, 3.0), (0.3, 1.7, 2.5), (4.0, 0.15, 1.0)])
def test_exact_data_gives_its_constants_back(a: float, b: float, c: float) -> None:
    amounts = [1, 2, 4, 8, 16, 64]
    law = fit_scaling_law(amounts, [a / q**b + c for q in amounts])
    assert (law.a, law.b, law.c) == pytest.approx((a, b, c), rel=1e-5)
    assert law.loss(32) == pytest.approx(a / 32**b + c, rel=1e-8)
    assert law.residual < 1e-7
    assert law.warnings == ()


def test_no_other_constants_are_better() -> None:
    amounts = np.array([1.0, 2, 4, 8, 16])
    losses = 0.8 / amounts**0.6 + 3 + np.array([0.01, -0.02, 0.015, -0.005, 0.0])
    law = fit_scaling_law(amounts.tolist(), losses.tolist())
    ours = np.sqrt(np.mean((law.a / amounts**law.b + law.c - losses) ** 2))
    assert law.residual == pytest.approx(ours)
    for a in law.a * np.array([0.98, 1, 1.02]):
        for b in law.b * np.array([0.95, 1, 1.05]):
            for c in law.c * np.array([0.995, 1, 1.005]):
                theirs = np.sqrt(np.mean((a / amounts**b + c - losses) ** 2))
                assert theirs >= ours - 1e-12


def test_three_points_fit_anything_and_it_says_so() -> None:
    law = fit_scaling_law([1, 2, 4], [4.0, 3.5, 3.3])
    assert law.residual < 1e-6
    assert "says nothing about the law" in law.warnings[0]


def test_constants_stay_positive() -> None:
    rising = fit_scaling_law([1, 2, 4, 8], [3.0, 3.1, 3.2, 3.4])
    assert rising.a == 0 and rising.c == pytest.approx(3.175)
    assert "does not fall" in rising.warnings[0]
    straight = fit_scaling_law([1, 2, 4, 8, 16], [4.0, 3.0, 2.0, 1.0, 0.2])
    assert straight.c == 0 and straight.a > 0
    assert "no floor" in straight.warnings[0]


@pytest.mark.parametrize(
    ("amounts", "losses"),
    [([1, 2], [3.0, 2.0]), ([1, 2, 2], [3.0, 2.0, 2.0]), ([1, 2, 4], [3.0, float("nan"), 2.0])],
)
def test_what_cannot_be_fitted_is_refused(amounts: list[float], losses: list[float]) -> None:
    with pytest.raises(ConfigError, match="granularity"):
        fit_scaling_law(amounts, losses)
