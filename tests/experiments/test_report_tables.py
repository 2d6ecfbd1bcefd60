"""Cells of the tables: means, spreads, units, what is bold, what is grey, what has a footnote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe.experiments.report.tables import (
    COLLAPSE_NOTE,
    Cell,
    Kind,
    Summary,
    Table,
    group_table,
    settings_table,
    unit_of,
)
from airmoe.experiments.report.usage import maps
from airmoe.training import override, preset
from tests.experiments.report_toys import (
    WIKIPEDIA_HASH,
    only_group,
    write_run,
    write_suite,
    write_usage,
)

BASELINE = {"overlap": None, "mass_recall": None, "mass_recall_bound": None}


def table_of(folder: Path, suite: str, runs: dict[str, Any], **options: Any) -> Table:
    write_suite(folder, suite, runs, **options)
    return group_table(only_group(folder))


def column(table: Table, title: str) -> dict[str, Cell]:
    at = table.columns.index(title)
    return {row[0].text: row[at] for row in table.rows}


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Table:
    folder = tmp_path_factory.mktemp("main")
    runs = {
        "air": {"perplexity": [61.0, 63.0], "flops": 1.02e7, "speed": 5000.0},
        "peer": {"perplexity": [64.0, 65.0], "flops": 1.05e7, "dead_experts": 0.0, **BASELINE},
        "hierarchical": {"perplexity": [66.0, 67.0], "entropy": 8.1, "overlap": 0.5},
        "exact": {"perplexity": [60.0, 60.0], "flops": 0.5e7, "speed": 9000.0},
        "coarse": {"perplexity": [70.0, 72.0], "flops": 1.02e7, "entropy": 4.9},
    }
    return table_of(folder, "main", runs, seeds=(42, 43))


def test_rows_and_columns(main: Table) -> None:
    names = [row[0].text for row in main.rows]
    assert names == ["AIR", "PEER", "Hierarchical", "Exact granular", "Coarse"]
    assert "; ".join(main.columns) == (
        "method; seeds; perplexity; FLOPs, algorithmic (T); FLOPs, executed (T); time (s); "
        "tokens/s (k); parameters (M); active (M); dead experts (%); entropy, nats; overlap"
    )
    assert [cell.text for cell in column(main, "seeds").values()] == ["2"] * 5


def test_mean_and_spread(main: Table) -> None:
    cells = column(main, "perplexity")
    # The sample standard deviation of 61 and 63 is the square root of 2.
    assert cells["AIR"].text == "62.00 ± 1.41"
    assert cells["AIR"].value == pytest.approx(62.0)
    assert cells["PEER"].text == "64.50 ± 0.71"
    assert cells["Exact granular"].text == "60.00"  # both seeds agree
    tokens = 360 * 512
    cells = column(main, "FLOPs, algorithmic (T)")
    assert cells["AIR"].text == f"{tokens * 1.02e7 / 1e12:.3f}" == "1.880"
    cells = column(main, "FLOPs, executed (T)")
    assert cells["AIR"].text == f"{1.5 * tokens * 1.02e7 / 1e12:.3f}" == "2.820"
    assert column(main, "time (s)")["AIR"].text == f"{tokens / 5000:.1f}" == "36.9"
    assert column(main, "tokens/s (k)")["AIR"].text == "5.00"
    assert column(main, "parameters (M)")["AIR"].text == "3.20"
    assert column(main, "dead experts (%)")["AIR"].text == "2.0"


def test_entropy_stands_beside_its_maximum(main: Table) -> None:
    cells = column(main, "entropy, nats")
    assert cells["AIR"].text == f"7.90 of {math.log(1024):.2f}"
    assert cells["Coarse"].text == f"4.90 of {math.log(32):.2f}"


def bold(table: Table, title: str) -> list[str]:
    return [name for name, cell in column(table, title).items() if cell.bold]


def test_nothing_that_seeds_move_is_bold_where_rows_have_different_ones(tmp_path: Path) -> None:
    fast, slow = {"speed": 5000.0, "dead_experts": 0.01}, {"speed": 4000.0, "dead_experts": 0.02}
    runs = {"air": {"perplexity": 61.0, **fast}, "hierarchical": {"perplexity": 64.0, **slow}}
    moved = ("perplexity", "dead experts (%)")
    table = table_of(tmp_path / "one", "main", runs)
    assert [bold(table, title) for title in moved] == [["AIR"], ["AIR"]]
    write_suite(tmp_path / "more", "main", {"air": {"perplexity": 60.0, **fast}}, seeds=(43,))
    table = group_table(only_group(tmp_path))
    assert [bold(table, title) for title in moved] == [[], []]
    assert bold(table, "tokens/s (k)") == ["AIR"]


def test_overlap_beside_dead_experts_is_never_bold(tmp_path: Path) -> None:
    """With few experts left, lists find all of them: that is collapse, no merit."""
    runs = {
        "air": {"perplexity": 61.0, "overlap": 0.99, "dead_experts": 0.051},
        "static": {"perplexity": 64.0, "overlap": 0.7, "mass_recall": 0.8},
        "euclidean": {"perplexity": 65.0, "overlap": 0.8, "mass_recall": 0.7},
    }
    table = table_of(tmp_path, "ablations", runs)
    assert bold(table, "perplexity") == ["AIR"]
    assert bold(table, "overlap") == ["Euclidean"]
    assert bold(table, "mass recall") == ["Static codebook"]
    assert table.notes[-1] == f"{COLLAPSE_NOTE} Here: AIR."


def test_the_best_is_bold_and_the_reference_grey(main: Table) -> None:
    assert bold(main, "perplexity") == ["AIR"]  # exact is lower, and out of competition
    assert bold(main, "tokens/s (k)") == ["AIR"]
    assert bold(main, "dead experts (%)") == ["PEER"]
    assert bold(main, "entropy, nats") == []  # of coarse experts there are fewer
    assert bold(main, "overlap") == ["AIR"]  # exact and coarse agree with themselves: no contest
    assert bold(main, "FLOPs, algorithmic (T)") == ["Hierarchical"]
    assert bold(main, "parameters (M)") == []  # no better or worse
    grey = {row[0].text for row in main.rows if all(cell.grey for cell in row)}
    assert grey == {row[0].text for row in main.rows if any(cell.grey for cell in row)}
    assert grey == {"Exact granular"}
    assert column(main, "overlap")["PEER"].text == "–"
    assert column(main, "overlap")["Exact granular"].text == "–"


def test_test_text_and_memory_where_a_run_has_them(tmp_path: Path) -> None:
    text = {"about": {"data_sha256": WIKIPEDIA_HASH}}
    runs = {
        "air": {"perplexity": [61.0, 63.0], "test": [70.0, 74.0], "memory": 12.5, **text},
        "peer": {"perplexity": [64.0, 65.0], "test": [69.0, 69.0], **text},
    }
    made = table_of(tmp_path, "main", runs, seeds=(42, 43))
    cells = column(made, "perplexity, test text")
    assert [cell.text for cell in cells.values()] == ["72.00 ± 2.83", "69.00"]
    assert bold(made, "perplexity, test text") == ["PEER"]
    cells = list(column(made, "peak memory (GiB)").values())
    assert [cell.text for cell in cells] == ["12.50", "–"]
    assert made.notes[0].startswith("Test text: WikiText-103's validation split in its tokenised")


def test_a_row_with_one_seed_has_no_spread(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"air": [61.0, 63.0]}, seeds=(42, 43))
    write_suite(tmp_path / "t", "main", {"peer": 65.0})
    table = group_table(only_group(tmp_path))
    assert column(table, "perplexity")["PEER"].text == "65.00"
    (spread,) = table.notes
    assert spread.endswith("it is left out with one seed, or if all agree.")


def test_the_reference_is_known_by_its_method(tmp_path: Path) -> None:
    for name, rate in (("one", 0.002), ("two", 0.003)):
        config = override(preset("tiny", "exact"), [f"training.learning_rate={rate}"])
        write_run(tmp_path / name, config, perplexity=50.0)
        config = override(preset("tiny", "coarse"), [f"training.learning_rate={rate}"])
        write_run(tmp_path / f"c-{name}", config, perplexity=70.0 + rate)
        for run in (tmp_path / name, tmp_path / f"c-{name}"):
            write_usage(run, np.arange(256) + 1)
    write_run(tmp_path / "air")
    group = only_group(tmp_path)
    table = group_table(group)
    assert bold(table, "perplexity") == ["AIR"]
    grey = [row[0].text for row in table.rows if all(cell.grey for cell in row)]
    assert grey == ["Exact granular", "Exact granular (two)"]
    assert [row[0].mark for row in table.rows if row[0].grey] == ["‡", "‡"]
    assert list(maps(group)) == ["exact", "exact (two)"]


def test_equal_texts_are_equally_best(tmp_path: Path) -> None:
    runs = {"air": 61.001, "euclidean": 61.002}
    table = table_of(tmp_path, "ablations", runs | {"static": 63.0})
    assert bold(table, "perplexity") == ["AIR", "Euclidean"]
    assert bold(table, "overlap") == []  # all the same


def test_expert_choice_is_out_of_the_contest_for_perplexity(tmp_path: Path) -> None:
    runs = {
        "air": 61.0,
        "static": 66.0,
        "expert_choice": {"perplexity": 50.0, "overlap": 0.9},
    }
    table = table_of(tmp_path, "ablations", runs)
    assert bold(table, "perplexity") == ["AIR"]
    assert bold(table, "overlap") == ["Expert choice"]
    marks = {name: cell.mark for name, cell in column(table, "perplexity").items()}
    assert marks == {"AIR": "", "Static codebook": "", "Expert choice": "†"}
    assert any("later tokens" in note for note in table.notes)


@pytest.mark.parametrize(
    ("suite", "variants", "shown"),
    [
        ("granularity", ["q16", "q2", "q1"], ["Q = 1", "Q = 2", "Q = 16"]),
        ("codebook", ["g64-m128", "g32-m256"], ["g32-m256", "g64-m128"]),
    ],
)
def test_rows_of_sweeps_are_in_the_order_of_their_numbers(
    tmp_path: Path, suite: str, variants: list[str], shown: list[str]
) -> None:
    table = table_of(tmp_path, suite, dict.fromkeys(variants, 60.0))
    assert [row[0].text for row in table.rows] == shown
    title, text = {
        "granularity": ("loss, nats", f"{math.log(60):.2f}"),
        "codebook": ("its bound", "1e-09"),
    }[suite]
    assert column(table, title)[shown[0]].text == text


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("flops", [3.241e17, 3.528e17], ["324.1", "352.8", "P"]),
        ("flops", [1.12e19, 3.5e18], ["11.20", "3.50", "E"]),
        ("seconds", [90.0, 110.0], ["90", "110", "s"]),
        ("seconds", [90.0, 130.0], ["1.50", "2.17", "min"]),
        ("seconds", [7300.0], ["2.03", "h"]),
        ("count", [600_000.0], ["600", "k"]),
        ("share", [0.786], ["78.6", "%"]),
        ("plain", [1234.567], ["1,234.57", ""]),
        ("tiny", [7.557e-11], ["7.6e-11", ""]),
    ],
)
def test_units(kind: Kind, values: list[float], expected: list[str]) -> None:
    unit = unit_of(kind, values)
    texts = [unit.written(Summary(value)) for value in values]
    assert [*texts, unit.name] == expected


def test_settings_shared_and_differing(tmp_path: Path) -> None:
    runs = {"air": 60.0, "peer": 61.0}
    write_suite(tmp_path / "s", "main", runs, seeds=(42, 43))
    table = settings_table(only_group(tmp_path))
    values = {row[0].text: row[1].text for row in table.rows}
    assert values["model.router"] == "AIR: air; PEER: peer"
    assert values["model.router_options.num_heads"] == "AIR: –; PEER: 8"
    assert values["training.steps"] == "360"
    assert values["training.seed"] == "42, 43"
    assert values["data hash"] == "ab" * 32
    assert values["machine.count"] == "2" and values["versions.torch"] == "2.13.0"
    assert values["git.commit"] == "c" * 40
