"""The paper's cells beside ours, and what is said to differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.paper import beside_paper
from airmoe.experiments.report.tables import Table
from airmoe.experiments.suites import SUITES
from airmoe.training import preset
from tests.experiments.report_toys import WIKIPEDIA_HASH, only_group, write_run, write_suite

BALANCED = (
    "load-balance loss: PEER, Hierarchical, Exact granular, Coarse; the paper states one for AIR "
    "only"
)


def beside(group: Group) -> tuple[Table, list[str]]:
    found = beside_paper(group)
    assert found is not None
    return found.table, found.differences


def test_the_paper_stands_beside_ours(tmp_path: Path) -> None:
    shorter = ["training.epochs=null", "training.steps=360", "training.precision=bf16"]
    shorter += ["data.folder=data/wiki"]
    runs = {"air": 30.0, "exact": 29.0}
    write_suite(tmp_path / "s", "main", runs, name="small", overrides=shorter)
    table, differences = beside(only_group(tmp_path))
    assert [cell.text for cell in table.rows[0]] == [
        "AIR", "30.00", "21.82", "0.0", "324.1", "2.0", "0.1", "7.90", "10.78",
    ]  # fmt: skip
    assert [cell.text for cell in table.rows[1]][:5] == [
        "Exact granular",
        "29.00",
        "21.34",
        "0.0",
        "467.5",
    ]
    assert table.rows[1][6].text == "–"  # the paper does not say
    text, length, precision, balanced = differences  # of devices nothing is known
    assert text == (
        "text: wikitext103, data.folder=data/wiki (data hash abababababab); the paper's is "
        "wikitext103"
    )
    assert length == "length: 184,320 tokens, 0.0152 % of the paper's 1,210,000,000"
    assert precision == "precision: bf16, the paper's is fp16"
    assert balanced == "load-balance loss: Exact granular; the paper states one for AIR only"


def test_only_methods_that_were_balanced_are_said_to_be(tmp_path: Path) -> None:
    runs = {name: 30.0 for name in ("air", "peer", "coarse")}
    write_suite(tmp_path / "s", "main", runs, name="small")
    none = ["model.load_balance_weight=0"]
    write_suite(tmp_path / "none", "main", runs, name="small", overrides=none)
    lines = {
        folder: [
            item for item in beside(only_group(tmp_path / folder))[1] if "balance loss" in item
        ]
        for folder in ("s", "none")
    }
    (line,) = lines["s"]
    assert ": PEER, Coarse; " in line
    assert lines["none"] == []


def test_runs_on_wikipedia_are_not_called_wikitext(tmp_path: Path) -> None:
    changed = ["training.epochs=1", "data.folder=data/wikipedia", "data.corpus=data/text"]
    text = {"about": {"data_sha256": WIKIPEDIA_HASH}}
    runs = {
        "air": {"perplexity": 30.0, "test": 40.0, **text},
        "coarse": {"perplexity": 33.0, "test": 44.5, **text},
    }
    write_suite(tmp_path / "s", "main", runs, name="small", overrides=changed)
    group = only_group(tmp_path)
    assert group.title == "Main: small, English Wikipedia 2015 extract, 1 epoch"
    table, differences = beside(group)
    assert table.columns[1:4] == ["perplexity: ours", "perplexity, test text: ours", "paper"]
    assert [cell.text for cell in table.rows[0][:4]] == ["AIR", "30.00", "40.00", "21.82"]
    assert [cell.text for cell in table.rows[1][2:4]] == ["44.50", "23.84"]
    (note,) = table.notes
    assert note.startswith("Test text: WikiText-103's validation split in its tokenised form")
    assert differences[0] == (
        f"text: English Wikipedia 2015 extract (data hash {WIKIPEDIA_HASH[:12]}); "
        "the paper's is wikitext103"
    )


def test_somebody_else_s_folder_of_that_name(tmp_path: Path) -> None:
    changed = ["data.folder=data/wikipedia", "data.corpus=data/text"]
    write_suite(tmp_path / "s", "main", {"air": 30.0}, overrides=changed)
    assert "text from wikipedia" in only_group(tmp_path).title


def test_ablations_have_their_own_paper_numbers(tmp_path: Path) -> None:
    runs = {"air": 30.0, "static": 31.0}
    write_suite(
        tmp_path / "s", "ablations", runs, name="small", overrides=["training.batch_size=32"]
    )
    table, differences = beside(only_group(tmp_path))
    assert table.rows[0][2].text == "21.72" and table.rows[1][2].text == "23.27"
    assert table.columns[-2:] == ["overlap: ours", "paper"]
    assert table.rows[1][-1].text == "0.07"
    assert "settings: training.batch_size=32" in differences


@pytest.mark.parametrize("suite", ["main", "ablations"])
def test_unchanged_settings_are_the_papers(tmp_path: Path, suite: str) -> None:
    variants = SUITES[suite].variants(preset("small"))
    write_suite(tmp_path / "s", suite, {name: 30.0 for name in variants}, name="small")
    table, differences = beside(only_group(tmp_path))
    assert len(table.rows) == 5
    length, *balanced = differences
    assert length.startswith("length: ")
    assert balanced == {"main": [BALANCED], "ablations": []}[suite]


def test_unchanged_single_runs_have_the_papers_settings(tmp_path: Path) -> None:
    for method in ("air", "peer", "hierarchical", "exact", "coarse"):
        write_run(tmp_path / method, preset("small", method), perplexity=30.0)
    table, differences = beside(only_group(tmp_path))
    assert len(table.rows) == 5
    length, balanced = differences
    assert length.startswith("length: ") and balanced == BALANCED


@pytest.mark.parametrize(
    ("device", "count", "lines"),
    [
        (
            "NVIDIA H200",
            1,
            ["devices: 1 NVIDIA H200; the paper had 4, each of which refreshes the lists"],
        ),
        ("NVIDIA H200", 4, []),  # how many of them worked?
        ("x86_64", 1, []),  # a thread
    ],
)
def test_devices_where_they_are_known(
    tmp_path: Path, device: str, count: int, lines: list[str]
) -> None:
    about = {"machine": {"device": device, "count": count}}
    write_run(tmp_path / "run", preset("small"), perplexity=30.0, about=about)
    _, differences = beside(only_group(tmp_path))
    assert [item for item in differences if item.startswith("devices")] == lines


def test_only_air_has_lists_to_refresh(tmp_path: Path) -> None:
    about = {"machine": {"device": "NVIDIA H200", "count": 1}}
    write_run(tmp_path / "run", preset("small", "peer"), perplexity=30.0, about=about)
    _, differences = beside(only_group(tmp_path))
    assert "devices: 1 NVIDIA H200; the paper had 4" in differences


def test_our_own_preset_has_no_paper_beside_it(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"air": 60.0})
    assert beside_paper(only_group(tmp_path)) is None
