"""Which runs stand in one table and one row, and what is said of the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import Record
from airmoe.files import read_json, write_json
from airmoe.training import override, preset
from tests.experiments.report_toys import (
    change_config,
    grouped,
    write_run,
    write_suite,
    write_usage,
)


def test_other_text_is_left_out(suite: Path) -> None:
    run = suite / "peer-seed42" / "run.json"
    write_json(run, read_json(run) | {"data_sha256": "cd" * 32})
    found = grouped(read_all([suite]))
    assert list(found.groups[0].variants) == ["air", "hierarchical", "coarse"]
    assert found.left_out == [
        "main/peer-seed42: other text than the rest of its group (data hash cdcdcdcdcdcd, not "
        "abababababab): left out"
    ]


def test_the_variant_that_alone_is_unfair_is_left_out(suite: Path) -> None:
    change_config(suite / "peer-seed42", "training", learning_rate=1.0)
    found = grouped(read_all([suite]))
    assert list(found.groups[0].variants) == ["air", "hierarchical", "coarse"]
    (line,) = found.left_out
    assert "peer is left out" in line
    assert "training.learning_rate 0.002 in air, hierarchical, coarse; 1.0 in peer" in line
    assert found.notes == []


def test_where_no_one_is_to_blame_it_is_a_note(tmp_path: Path) -> None:
    write_suite(tmp_path / "s", "main", {name: 60.0 for name in ("air", "peer")})
    change_config(tmp_path / "s" / "peer-seed42", "training", warmup=0.5)
    found = grouped(read_all([tmp_path]))
    assert list(found.groups[0].variants) == ["air", "peer"]
    assert found.left_out == []
    (line,) = found.notes
    assert "training.warmup 0.05 in air; 0.5 in peer" in line


def test_seeds_of_a_variant_share_their_settings(tmp_path: Path) -> None:
    runs = {"air": [60.0, 61.0], "peer": [62.0, 63.0]}
    write_suite(tmp_path / "s", "main", runs, seeds=(42, 43))
    change_config(tmp_path / "s" / "air-seed43", "model", num_experts_per_tok=16)
    found = grouped(read_all([tmp_path]))
    first, other = found.groups
    assert [(run.variant, run.seed) for run in first.runs] == [
        ("air", 42),
        ("peer", 42),
        ("peer", 43),
    ]
    assert [(run.variant, run.seed) for run in other.runs] == [("air", 43)]
    assert other.title == f"{first.title}, with model.num_experts_per_tok = 16"
    (note,) = found.notes
    assert note.endswith("not every variant has every seed (42 of air; 42, 43 of peer)")


def test_a_suite_with_other_settings_is_a_table_of_its_own(suite: Path, tmp_path: Path) -> None:
    """Whatever the two have in common: all of their runs are shown."""
    shutil.copytree(suite, tmp_path / "warm")
    for variant in ("air", "peer", "hierarchical", "coarse"):
        change_config(tmp_path / "warm" / f"{variant}-seed42", "training", warmup=0.1)
    change_config(tmp_path / "warm" / "coarse-seed42", "training", learning_rate=0.1)
    found = grouped(read_all([suite, tmp_path / "warm"]))
    first, warm, both = found.groups
    assert list(first.variants) == ["air", "peer", "hierarchical", "coarse"]
    assert list(warm.variants) == ["air", "peer", "hierarchical"]
    assert warm.title == f"{first.title}, with training.warmup = 0.1"
    assert list(both.variants) == ["coarse"]
    assert both.title.endswith("with training.learning_rate = 0.1, training.warmup = 0.1")
    assert len({group.slug for group in found.groups}) == 3
    assert found.left_out == found.notes == []


def test_the_same_run_in_two_folders_is_no_second_seed(suite: Path, tmp_path: Path) -> None:
    shutil.copytree(suite, tmp_path / "again")
    found = grouped(read_all([suite, tmp_path / "again"]))
    assert len(found.groups[0].runs) == 4
    first = found.left_out[0]
    assert first == "again/air-seed42: the same variant and seed as main/air-seed42: left out"


def test_two_suites_with_other_seeds_are_one_group(tmp_path: Path) -> None:
    for seed in (42, 43):
        write_suite(tmp_path / str(seed), "main", {"air": 60.0}, seeds=(seed,))
    (group,) = grouped(read_all([tmp_path])).groups
    assert [run.seed for run in group.variants["air"]] == [42, 43]


def rows(record: Record) -> dict[str, list[str]]:
    """Variant -> its runs, of the only group."""
    (group,) = grouped(record).groups
    return {variant: [run.name for run in runs] for variant, runs in group.variants.items()}


def test_single_runs_with_equal_settings_are_seeds_of_one_row(good: Path) -> None:
    for folder, rate, seed in (
        ("h/run", 0.003, 42),
        ("i/run", 0.004, 42),
        ("j/run", 0.003, 43),
        ("k", 0.002, 43),
        ("l", 0.004, 44),
    ):
        changes = [f"training.learning_rate={rate}", f"training.seed={seed}"]
        write_run(good / folder, override(preset("tiny"), changes))
    assert rows(read_all([good])) == {
        "air": ["runs/good", "runs/k"],
        "air (h/run)": ["runs/h/run", "runs/j/run"],
        "air (i/run)": ["runs/i/run", "runs/l"],
    }


def test_rows_of_runs_with_the_same_name(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "run" for folder in "abc"]
    for path, rate in zip(paths, (0.002, 0.003, 0.004), strict=True):
        write_run(path, [f"training.learning_rate={rate}"])
        write_usage(path, np.arange(4096) + 1)
    record = read_all(paths)
    assert list(rows(record)) == ["air", "air (run-2)", "air (run-3)"]
    for run in record.runs:  # every row has a map to draw
        assert run.usage is not None and run.usage.levels is not None


def test_names_of_groups_differ(tmp_path: Path) -> None:
    for index, corpus in enumerate(("text_a", "text-a", "text a", "中", "文")):
        write_run(tmp_path / str(index), [f"data.corpus={corpus}"])
    groups = grouped(read_all([tmp_path])).groups
    assert sorted(group.slug for group in groups) == [
        "single-runs-tiny-184320-tokens",
        "single-runs-tiny-184320-tokens-2",
        "single-runs-tiny-text-a-184320-tokens",
        "single-runs-tiny-text-a-184320-tokens-2",
        "single-runs-tiny-text-a-184320-tokens-3",
    ]


def test_times_of_two_machines(suite: Path) -> None:
    result = suite / "peer-seed42" / "result.json"
    write_json(result, read_json(result) | {"machine": {"device": "H200", "count": 1}})
    (note,) = grouped(read_all([suite])).notes
    assert note.endswith("different machines (1 x H200; 2 x x86_64): times do not compare")


def old(perplexity: float) -> dict[str, object]:
    """Of the time before runs noted their balance loss."""
    return {"perplexity": perplexity, "about": {"balance": None}}


def test_balance_losses_of_two_conventions_are_never_mixed(tmp_path: Path) -> None:
    """One expert per token is the same in both."""
    runs = {"air": old(61.0), "peer": 64.0, "coarse": old(66.0)}
    write_suite(tmp_path / "mixed", "main", runs)
    found = grouped(read_all([tmp_path / "mixed"]))
    assert list(found.groups[0].variants) == ["peer", "coarse"]
    assert found.left_out == [
        "mixed/air-seed42: balance loss with f sums to 1, K times weaker than that of the rest of "
        "its group: left out"
    ]

    write_suite(tmp_path / "old", "main", {"air": old(61.0), "coarse": old(66.0)})
    found = grouped(read_all([tmp_path / "old"]))
    assert list(found.groups[0].variants) == ["air", "coarse"] and found.left_out == []
    (note,) = found.notes
    assert note.endswith("compares with no run of today")


def test_without_a_balance_loss_there_is_no_weaker_one(tmp_path: Path) -> None:
    none = override(preset("tiny"), ["model.load_balance_weight=0"])
    write_run(tmp_path / "run", none, about={"balance": None})
    found = grouped(read_all([tmp_path]))
    assert found.notes == found.left_out == []
