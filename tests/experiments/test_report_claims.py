"""The claims table: paired effects, their intervals, and what follows from them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from airmoe.experiments.report.claims import (
    SINGLE_PAIR,
    Claim,
    claims,
    claims_table,
    half_width,
)
from tests.experiments.report_toys import only_group, write_suite


@pytest.mark.parametrize(
    ("effect", "half", "paper", "verdict"),
    [
        (-0.03, 0.02, -0.02, "holds"),
        (0.03, 0.02, 0.02, "holds"),  # the paper too has the other ahead
        (0.03, 0.02, -0.02, "not seen"),  # on the other side
        (-0.005, 0.02, -0.08, "not seen"),  # the paper's effect is too large to be overlooked
        (-0.005, 0.02, -0.02, "open"),
        (-0.005, 0.02, None, "open"),
        (-0.03, 0.02, None, "holds"),
    ],
)
def test_verdicts(effect: float, half: float, paper: float | None, verdict: str) -> None:
    claim = Claim(
        other="peer", paper=paper, effect=effect, half_width=half, seeds=[1], marked=False
    )
    assert claim.verdict == verdict


def test_intervals() -> None:
    assert half_width([0.5]) == SINGLE_PAIR
    assert half_width([0.5, -0.5]) == SINGLE_PAIR / math.sqrt(2)  # two say little of their spread
    three = [0.01, 0.02, 0.06]
    assert half_width(three) == pytest.approx(4.303 * np.std(three, ddof=1) / math.sqrt(3))


def test_effects_are_those_of_the_seeds_that_both_have(tmp_path: Path) -> None:
    write_suite(tmp_path / "a", "main", {"air": [60.0, 62.0]}, seeds=(1, 2), name="small")
    write_suite(tmp_path / "b", "main", {"peer": [61.0, 90.0]}, seeds=(1, 3), name="small")
    write_suite(tmp_path / "c", "main", {"coarse": 70.0}, seeds=(9,), name="small")
    group = only_group(tmp_path)
    (claim,) = claims(group)
    assert (claim.other, claim.seeds) == ("peer", [1])
    assert claim.effect == pytest.approx(math.log(60 / 61))
    assert claim.paper == pytest.approx(math.log(21.82 / 22.25))
    table = claims_table(group)
    assert table is not None
    assert [cell.text for cell in table.rows[0]] == [
        "PEER", "-1.9", "-1.6", "-3.5 to +0.2", "1", "open",
    ]  # fmt: skip


def test_nothing_to_claim_without_air_or_others(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"peer": 60.0})
    assert claims_table(only_group(tmp_path)) is None
