"""The paper's numbers and claims beside ours, and what is said to differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe.experiments.report.paper import (
    SINGLE_PAIR,
    Claim,
    beside_paper,
    claims,
    claims_table,
    half_width,
)
from airmoe.experiments.report.tables import Table
from tests.experiments.report_toys import WIKIPEDIA_HASH, only_group, write_suite


def beside(folder: Path) -> tuple[Table, list[str]]:
    found = beside_paper(only_group(folder))
    assert found is not None
    return found.table, found.differences


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def small(folder: Path, runs: Any, *overrides: str, suite: str = "main") -> Path:
    return write_suite(folder / "s", suite, runs, name="small", overrides=overrides)


def test_the_paper_stands_beside_ours(tmp_path: Path) -> None:
    shorter = ["training.epochs=null", "training.steps=360", "training.precision=bf16"]
    folder = small(tmp_path, {"air": 30.0, "exact": 29.0}, *shorter, "data.corpus=novels")
    table, differences = beside(folder)
    air, exact = texts(table)
    assert air == ["AIR", "30.00", "21.82", "0.0", "324.1", "2.0", "0.1", "7.90", "10.78"]
    assert exact[:5] == ["Exact granular", "29.00", "21.34", "0.0", "467.5"]
    assert exact[6] == "–"  # the paper does not say
    assert differences == [
        "text: novels (data hash abababababab), the paper's wikitext103",
        "length: 184,320 tokens, 0.0152 % of the paper's 1,210,000,000",
        "precision: bf16, the paper's fp16",
    ]


def test_runs_on_wikipedia_are_not_called_wikitext(tmp_path: Path) -> None:
    text = {"about": {"data_sha256": WIKIPEDIA_HASH}}
    runs = {"air": {"perplexity": 30.0, "test": 40.0, **text}}
    table, differences = beside(small(tmp_path, runs))
    assert table.columns[1:4] == ["perplexity: ours", "paper", "perplexity, test text: ours"]
    assert texts(table)[0][:4] == ["AIR", "30.00", "21.82", "40.00"]
    (note,) = table.notes
    assert note.startswith("Test text: WikiText-103's validation split in its tokenised form")
    named = f"text: English Wikipedia 2015 extract (data hash {WIKIPEDIA_HASH[:12]})"
    assert differences[0] == f"{named}, the paper's wikitext103"


def test_ablations_have_their_own_paper_numbers(tmp_path: Path) -> None:
    table, _ = beside(small(tmp_path, {"air": 30.0, "static": 31.0}, suite="ablations"))
    air, static = texts(table)
    assert (air[2], static[2], static[-1]) == ("21.72", "23.27", "0.07")
    assert table.columns[-2:] == ["overlap: ours", "paper"]


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
    for variant, perplexities, seeds in (
        ("air", [60.0, 62.0], (1, 2)),
        ("peer", [61.0, 90.0], (1, 3)),
        ("coarse", [70.0], (9,)),
    ):
        write_suite(tmp_path / variant, "main", {variant: perplexities}, seeds=seeds, name="small")
    group = only_group(tmp_path)
    (claim,) = claims(group)
    assert (claim.other, claim.seeds) == ("peer", [1])
    assert claim.effect == pytest.approx(math.log(60 / 61))
    assert claim.paper == pytest.approx(math.log(21.82 / 22.25))
    table = claims_table(group)
    assert table is not None
    assert texts(table) == [["PEER", "-1.9", "-1.6", "-3.5 to +0.2", "1", "open"]]


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    """Neither a preset of the paper nor AIR."""
    write_suite(tmp_path / "s", "main", {"peer": 60.0})
    group = only_group(tmp_path)
    assert beside_paper(group) is None and claims_table(group) is None
