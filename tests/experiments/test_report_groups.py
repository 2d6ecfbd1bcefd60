"""Which runs stand in one table and one row, what they are called, and what is noted."""

from __future__ import annotations

import shutil
from pathlib import Path

from airmoe.experiments.report.groups import Grouped, group_runs, title_of
from airmoe.experiments.report.reading import read_all
from airmoe.files import read_json, write_json
from tests.experiments.report_toys import (
    WIKIPEDIA_HASH,
    change_config,
    only_group,
    write_run,
    write_suite,
)


def grouped(*folders: Path) -> Grouped:
    return group_runs(read_all(folders).runs)


def rows(found: Grouped) -> dict[str, list[str]]:
    """Variant -> its runs, of the only group."""
    (group,) = found.groups
    return {variant: [run.name for run in runs] for variant, runs in group.variants.items()}


def test_other_texts_and_lengths_are_other_tables(suite: Path) -> None:
    run = suite / "peer-seed42" / "run.json"
    write_json(run, read_json(run) | {"data_sha256": "cd" * 32})
    change_config(suite / "coarse-seed42", "training", steps=200)
    found = grouped(suite)
    title = "Main: tiny, python-docs, 184,320 tokens"
    assert {group.title: list(group.variants) for group in found.groups} == {
        title: ["air", "hierarchical"],
        "Main: tiny, python-docs, 102,400 tokens": ["coarse"],
        f"{title}, data hash cdcdcdcdcdcd": ["peer"],
    }
    assert len({group.slug for group in found.groups}) == 3


def test_a_known_text_has_its_proper_name(tmp_path: Path) -> None:
    write_run(tmp_path / "run", about={"data_sha256": WIKIPEDIA_HASH})
    title = "Single runs: tiny, English Wikipedia 2015 extract, 184,320 tokens"
    assert only_group(tmp_path).title == title


def test_how_a_text_was_named_separates_no_runs(tmp_path: Path) -> None:
    about = {"data_recipe": {"corpus": "novels"}}
    write_run(tmp_path / "a", ["data.folder=data/texts"], about=about)
    write_run(tmp_path / "b", ["data.corpus=novels/", "training.seed=43"], about=about)
    found = grouped(tmp_path)
    assert {name: len(runs) for name, runs in rows(found).items()} == {"air": 2}
    assert "novels" in found.groups[0].title and found.notes == []


def test_an_unfair_variant_is_noted(suite: Path) -> None:
    change_config(suite / "peer-seed42", "training", learning_rate=1.0)
    found = grouped(suite)
    assert len(rows(found)) == 4 and found.left_out == []
    (line,) = found.notes
    assert line.startswith("Main: tiny, python-docs, 184,320 tokens: E, everything else equal: ")
    assert "training.learning_rate 0.002 in air, hierarchical, coarse; 1.0 in peer" in line


def test_seeds_machines_and_versions_are_noted(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {"air": [60.0, 61.0]}, seeds=(42, 43))
    about = {"machine": {"device": "H200", "count": 1}, "versions": {"torch": "2.11.0"}}
    write_suite(tmp_path / "t", "main", {"peer": {"perplexity": 61.0, "about": about}})
    seeds, machines, versions = (note.partition("tokens: ")[2] for note in grouped(tmp_path).notes)
    assert seeds == "not every variant has every seed (42, 43 of air; 42 of peer)"
    assert machines == "different machines (1 x H200; 2 x x86_64): times do not compare"
    assert versions == "different versions of torch (2.11.0; 2.13.0): times do not compare"


def test_the_same_run_in_two_folders_is_no_second_seed(suite: Path, tmp_path: Path) -> None:
    shutil.copytree(suite, tmp_path / "again")
    found = grouped(suite, tmp_path / "again")
    assert len(found.groups[0].runs) == 4
    first = found.left_out[0]
    assert first == "again/air-seed42: the same variant and seed as main/air-seed42: left out"


def test_single_runs_with_equal_settings_are_seeds_of_one_row(good: Path) -> None:
    for folder, rate, seed in (("h", 0.003, 42), ("j", 0.003, 43), ("k", 0.002, 43)):
        write_run(good / folder, [f"training.learning_rate={rate}", f"training.seed={seed}"])
    assert rows(grouped(good)) == {
        "air": ["runs/good", "runs/k"],
        "air (h)": ["runs/h", "runs/j"],
    }
    assert title_of("air (h)") == "AIR (h)"


def test_rows_of_runs_with_the_same_name(tmp_path: Path) -> None:
    for folder, rate in zip("abc", (0.002, 0.003, 0.004), strict=True):
        write_run(tmp_path / folder / "run", [f"training.learning_rate={rate}"])
    paths = [tmp_path / folder / "run" for folder in "abc"]
    assert list(rows(grouped(*paths))) == ["air", "air (run 2)", "air (run)"]
