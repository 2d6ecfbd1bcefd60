"""Cells of the tables: means, spreads, units, what is bold, what is grey, what has a footnote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe.experiments.report.rendering import markdown_cell
from airmoe.experiments.report.tables import (
    COLLAPSE_NOTE,
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


def shown(table: Table, *titles: str) -> list[str]:
    """The rows as Markdown writes them, of these columns."""
    places = [0, *map(table.columns.index, titles)]
    return [" | ".join(markdown_cell(row[place]) for place in places) for row in table.rows]


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


def test_means_spreads_the_best_and_the_reference(main: Table) -> None:
    """The sample standard deviation of 61 and 63 is the square root of 2, that of equal seeds 0.

    Exact routing is better, and out of competition: it is grey, and agrees with itself.
    """
    assert "; ".join(main.columns) == (
        "method; seeds; perplexity; FLOPs, algorithmic (T); FLOPs, executed (T); time (s); "
        "tokens/s (k); parameters (M); active (M); dead experts (%); entropy, nats; overlap"
    )
    assert shown(main, "seeds", "perplexity", "dead experts (%)", "overlap") == [
        "AIR | 2 | **62.00 ± 1.41** | 2.0 | **0.70**",
        "PEER | 2 | 64.50 ± 0.71 | **0.0** | –",
        "Hierarchical | 2 | 66.50 ± 0.71 | 2.0 | 0.50",
        "*Exact granular*‡ | *2* | *60.00* | *2.0* | *–*",
        "Coarse | 2 | 71.00 ± 1.41 | 2.0 | –",
    ]
    assert main.rows[0][2].value == 62.0  # by which the page sorts
    tokens = 360 * 512
    assert f"{tokens * 1.02e7 / 1e12:.3f} {tokens / 5000:.1f}" == "1.880 36.9"
    costs = ("FLOPs, algorithmic (T)", "FLOPs, executed (T)", "time (s)", "tokens/s (k)")
    assert shown(main, *costs) == [
        "AIR | 1.880 | 2.820 | **36.9** | **5.00**",
        "PEER | 1.935 | 2.903 | 46.1 | 4.00",
        "Hierarchical | **1.843** | **2.765** | 46.1 | 4.00",
        "*Exact granular*‡ | *0.922* | *1.382* | *20.5* | *9.00*",
        "Coarse | 1.880 | 2.820 | 46.1 | 4.00",
    ]
    # Sizes are neither better nor worse; entropies with different maxima do not compare.
    few, many = f"of {math.log(32):.2f}", f"of {math.log(1024):.2f}"
    assert shown(main, "parameters (M)", "active (M)", "entropy, nats") == [
        f"AIR | 3.20 | 1.60 | 7.90 {many}",
        f"PEER | 3.20 | 1.60 | 7.90 {many}",
        f"Hierarchical | 3.20 | 1.60 | 8.10 {many}",
        f"*Exact granular*‡ | *3.20* | *1.60* | *7.90 {many}*",
        f"Coarse | 3.20 | 1.60 | 4.90 {few}",
    ]


def test_nothing_that_seeds_move_is_bold_where_rows_have_different_ones(tmp_path: Path) -> None:
    fast, slow = {"speed": 5000.0, "dead_experts": 0.01}, {"speed": 4000.0, "dead_experts": 0.02}
    runs = {"air": {"perplexity": 61.0, **fast}, "hierarchical": {"perplexity": 64.0, **slow}}
    titles = ("perplexity", "dead experts (%)", "tokens/s (k)")
    table = table_of(tmp_path / "one", "main", runs)
    assert shown(table, *titles)[0] == "AIR | **61.00** | **1.0** | **5.00**"
    write_suite(tmp_path / "more", "main", {"air": {"perplexity": 60.0, **fast}}, seeds=(43,))
    table = group_table(only_group(tmp_path))
    assert shown(table, *titles)[0] == "AIR | 60.50 ± 0.71 | 1.0 | **5.00**"
    assert shown(table, *titles)[1] == "Hierarchical | 64.00 | 2.0 | 4.00"  # one seed: no spread
    (spread,) = table.notes
    assert spread.endswith("it is left out with one seed, or if all agree.")


def test_overlap_beside_dead_experts_is_never_bold(tmp_path: Path) -> None:
    """With few experts left, lists find all of them: that is collapse, no merit."""
    runs = {
        "air": {"perplexity": 61.0, "overlap": 0.99, "dead_experts": 0.051},
        "static": {"perplexity": 64.0, "overlap": 0.7, "mass_recall": 0.8},
        "euclidean": {"perplexity": 65.0, "overlap": 0.8, "mass_recall": 0.7},
    }
    table = table_of(tmp_path, "ablations", runs)
    assert shown(table, "perplexity", "overlap", "mass recall") == [
        "AIR | **61.00** | 0.99 | 0.80",
        "Static codebook | 64.00 | 0.70 | **0.80**",
        "Euclidean | 65.00 | **0.80** | 0.70",
    ]
    assert table.notes[-1] == f"{COLLAPSE_NOTE} Here: AIR."


def test_test_text_and_memory_where_a_run_has_them(tmp_path: Path) -> None:
    text = {"about": {"data_sha256": WIKIPEDIA_HASH}}
    runs = {
        "air": {"perplexity": [61.0, 63.0], "test": [70.0, 74.0], "memory": 12.5, **text},
        "peer": {"perplexity": [64.0, 65.0], "test": [69.0, 69.0], **text},
    }
    table = table_of(tmp_path, "main", runs, seeds=(42, 43))
    assert shown(table, "perplexity, test text", "peak memory (GiB)") == [
        "AIR | 72.00 ± 2.83 | 12.50",
        "PEER | **69.00** | –",
    ]
    assert table.notes[0].startswith("Test text: WikiText-103's validation split in its tokenised")


def test_the_reference_is_known_by_its_method(tmp_path: Path) -> None:
    for name, rate in (("one", 0.002), ("two", 0.003)):
        for method, perplexity in (("exact", 50.0), ("coarse", 70.0)):
            config = override(preset("tiny", method), [f"training.learning_rate={rate}"])
            write_run(tmp_path / f"{method}-{name}", config, perplexity=perplexity)
            write_usage(tmp_path / f"{method}-{name}", np.arange(256) + 1)
    write_run(tmp_path / "air")
    group = only_group(tmp_path)
    assert shown(group_table(group), "perplexity") == [
        "AIR | **60.00**",
        "*Exact granular*‡ | *50.00*",
        "*Exact granular (exact-two)*‡ | *50.00*",
        "Coarse | 70.00",
        "Coarse (coarse-two) | 70.00",
    ]
    assert list(maps(group)) == ["exact", "exact (exact-two)"]


def test_equal_texts_are_equally_best(tmp_path: Path) -> None:
    table = table_of(tmp_path, "ablations", {"air": 61.001, "euclidean": 61.002, "static": 63.0})
    assert shown(table, "perplexity", "overlap") == [
        "AIR | **61.00** | 0.70",  # in the overlap all are the same
        "Static codebook | 63.00 | 0.70",
        "Euclidean | **61.00** | 0.70",
    ]


def test_expert_choice_is_out_of_the_contest_for_perplexity(tmp_path: Path) -> None:
    runs = {"air": 61.0, "static": 66.0, "expert_choice": {"perplexity": 50.0, "overlap": 0.9}}
    table = table_of(tmp_path, "ablations", runs)
    assert shown(table, "perplexity", "overlap") == [
        "AIR | **61.00** | 0.70",
        "Static codebook | 66.00 | 0.70",
        "Expert choice† | 50.00† | **0.90**",
    ]
    assert any("later tokens" in note for note in table.notes)


@pytest.mark.parametrize(
    ("suite", "variants", "title", "rows"),
    [
        ("granularity", ["q16", "q1"], "loss, nats", ["Q = 1 | 4.09", "Q = 16 | 4.09"]),
        (
            "codebook",
            ["g64-m128", "g32-m256"],
            "its bound",
            ["g32-m256 | 1e-09", "g64-m128 | 1e-09"],
        ),
    ],
)
def test_rows_of_sweeps_are_in_the_order_of_their_numbers(
    tmp_path: Path, suite: str, variants: list[str], title: str, rows: list[str]
) -> None:
    assert shown(table_of(tmp_path, suite, dict.fromkeys(variants, 60.0)), title) == rows


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
