"""The paper's numbers and claims beside ours, and what is said to differ."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe.experiments.report.claims import SINGLE_PAIR, Claim, claims, claims_table, half_width
from airmoe.experiments.report.paper import beside_paper
from airmoe.experiments.report.tables import Table
from airmoe.experiments.suites import SUITES
from airmoe.training import method_run, preset
from tests.experiments.report_toys import WIKIPEDIA_HASH, only_group, write_run, write_suite

BALANCED = (
    "load-balance loss: PEER, Hierarchical, Exact granular, Coarse; the paper states one for AIR "
    "only"
)


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
    folder = small(tmp_path, {"air": 30.0, "exact": 29.0}, *shorter, "data.folder=data/wiki")
    table, differences = beside(folder)
    air, exact = texts(table)
    assert air == ["AIR", "30.00", "21.82", "0.0", "324.1", "2.0", "0.1", "7.90", "10.78"]
    assert exact[:5] == ["Exact granular", "29.00", "21.34", "0.0", "467.5"]
    assert exact[6] == "–"  # the paper does not say
    assert differences == [  # of devices nothing is known
        "text: wikitext103, data.folder=data/wiki (data hash abababababab); the paper's is "
        "wikitext103",
        "length: 184,320 tokens, 0.0152 % of the paper's 1,210,000,000",
        "precision: bf16, the paper's is fp16",
        "load-balance loss: Exact granular; the paper states one for AIR only",
    ]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], ["load-balance loss: PEER, Coarse; the paper states one for AIR only"]),
        (["model.load_balance_weight=0"], []),
    ],
)
def test_only_methods_that_were_balanced_are_said_to_be(
    tmp_path: Path, overrides: list[str], named: list[str]
) -> None:
    folder = small(tmp_path, dict.fromkeys(("air", "peer", "coarse"), 30.0), *overrides)
    assert [line for line in beside(folder)[1] if "balance loss" in line] == named


def test_runs_on_wikipedia_are_not_called_wikitext(tmp_path: Path) -> None:
    text = {"about": {"data_sha256": WIKIPEDIA_HASH}}
    runs = {
        "air": {"perplexity": 30.0, "test": 40.0, **text},
        "coarse": {"perplexity": 33.0, "test": 44.5, **text},
    }
    changed = ["training.epochs=1", "data.folder=data/wikipedia", "data.corpus=data/text"]
    folder = small(tmp_path, runs, *changed)
    assert only_group(folder).title == "Main: small, English Wikipedia 2015 extract, 1 epoch"
    table, differences = beside(folder)
    assert table.columns[1:4] == ["perplexity: ours", "perplexity, test text: ours", "paper"]
    air, coarse = texts(table)
    assert (air[:4], coarse[2:4]) == (["AIR", "30.00", "40.00", "21.82"], ["44.50", "23.84"])
    (note,) = table.notes
    assert note.startswith("Test text: WikiText-103's validation split in its tokenised form")
    assert differences[0] == (
        f"text: English Wikipedia 2015 extract (data hash {WIKIPEDIA_HASH[:12]}); "
        "the paper's is wikitext103"
    )


def test_somebody_else_s_folder_of_that_name(tmp_path: Path) -> None:
    folder = small(tmp_path, {"air": 30.0}, "data.folder=data/wikipedia", "data.corpus=data/text")
    assert "text from wikipedia" in only_group(folder).title


def test_ablations_have_their_own_paper_numbers(tmp_path: Path) -> None:
    runs = {"air": 30.0, "static": 31.0}
    table, differences = beside(small(tmp_path, runs, "training.batch_size=32", suite="ablations"))
    air, static = texts(table)
    assert (air[2], static[2], static[-1]) == ("21.72", "23.27", "0.07")
    assert table.columns[-2:] == ["overlap: ours", "paper"]
    assert "settings: training.batch_size=32" in differences


@pytest.mark.parametrize("suite", ["main", "ablations", None])
def test_unchanged_settings_are_the_papers(tmp_path: Path, suite: str | None) -> None:
    variants = SUITES[suite or "main"].variants(preset("small"))
    fp16 = "training.precision=fp16"
    if suite is None:  # single runs
        for method in variants:
            write_run(tmp_path / "s" / method, method_run("small", method, [fp16]))
    else:
        small(tmp_path, dict.fromkeys(variants, 30.0), fp16, suite=suite)
    table, (length, *balanced) = beside(tmp_path / "s")
    assert len(table.rows) == 5
    assert length.startswith("length: ")
    assert balanced == ([] if suite == "ablations" else [BALANCED])


@pytest.mark.parametrize(
    ("device", "count", "method", "lines"),
    [
        ("NVIDIA H200", 1, "air", ["1 NVIDIA H200; the paper had 4, each of which refreshes the"]),
        ("NVIDIA H200", 1, "peer", ["1 NVIDIA H200; the paper had 4"]),  # no lists to refresh
        ("NVIDIA H200", 4, "air", []),  # how many of them worked?
        ("x86_64", 1, "air", []),  # a thread
    ],
)
def test_devices_where_they_are_known(
    tmp_path: Path, device: str, count: int, method: str, lines: list[str]
) -> None:
    about = {"machine": {"device": device, "count": count}}
    write_run(tmp_path / "run", preset("small", method), about=about)
    found = [line for line in beside(tmp_path)[1] if line.startswith("devices")]
    assert [line.removesuffix(" lists") for line in found] == [f"devices: {one}" for one in lines]


def test_our_own_preset_has_no_paper_beside_it(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"air": 60.0})
    assert beside_paper(only_group(tmp_path)) is None


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


def test_nothing_to_claim_without_air_or_others(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"peer": 60.0})
    assert claims_table(only_group(tmp_path)) is None
