"""Suite folders: what crashed, has not begun, or is not as the rest is named and left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from airmoe.experiments.report.reading import read_all
from airmoe.files import read_json, write_json
from airmoe.training import override, preset
from tests.experiments.report_toys import (
    change_config,
    grouped,
    write_suite,
)


def test_crashed_runs_and_runs_to_come(suite: Path) -> None:
    crash = {"message": "the disk is full", "code": 1}
    write_json(suite / "peer-seed42.failed.json", crash)
    (suite / "peer-seed42" / "result.json").unlink()
    shutil.rmtree(suite / "coarse-seed42")
    shutil.copytree(suite / "air-seed42", suite / "air-old")
    record = read_all([suite.parent])
    assert [run.variant for run in record.runs] == ["air", "hierarchical"]
    assert [run.suite for run in record.runs] == ["main", "main"]
    assert record.problems == [
        "suites/main/peer-seed42: crashed, step 360, loss 4.094: the disk is full (exit code 1)",
        "suites/main/coarse-seed42: has not begun",
        "suites/main/air-old: is not in suite.json: left out",
    ]


def test_a_finished_run_is_finished_whatever_failed(suite: Path) -> None:
    for variant in ("air", "peer"):
        write_json(suite / f"{variant}-seed42.failed.json", {"message": "lost", "code": 1})
    result = suite / "peer-seed42" / "result.json"
    other = override(preset("tiny", "peer"), ["training.steps=7"]).to_json()
    write_json(result, read_json(result) | {"config": other})
    record = read_all([suite])
    assert [run.variant for run in record.runs] == ["air", "hierarchical", "coarse"]
    # The result is of another run: this one has none.
    assert record.problems == [
        "main/peer-seed42: crashed, step 360, loss 4.094: lost (exit code 1)"
    ]


@pytest.mark.parametrize("folder", [3, None, ["a"], "", "..", "../x", "/x", "peer-seed42"])
def test_a_folder_of_a_suite_that_is_no_name(suite: Path, folder: object) -> None:
    plan = read_json(suite / "suite.json")
    plan["runs"][-1]["folder"] = folder  # coarse
    write_json(suite / "suite.json", plan)
    record = read_all([suite])
    assert [run.variant for run in record.runs] == ["air", "peer", "hierarchical"]
    assert record.problems == [
        f"main/suite.json: runs[3].folder is {folder!r}, no name of its own: left out",
        "main/coarse-seed42: is not in suite.json: left out",
    ]


def test_a_run_of_a_suite_that_is_no_object(suite: Path) -> None:
    plan = read_json(suite / "suite.json")
    plan["runs"].append("air")
    write_json(suite / "suite.json", plan)
    record = read_all([suite])
    assert len(record.runs) == 4
    assert record.problems == [
        "main/suite.json: runs[4].folder is None, no name of its own: left out"
    ]


@pytest.mark.parametrize(
    ("section", "options", "what"),
    [
        ("training", {"steps": 200}, "102,400 tokens instead of 184,320 tokens"),
        ("data", {"corpus": "text8"}, "text8 instead of python-docs"),
    ],
)
def test_another_length_or_corpus_in_a_suite_is_left_out(
    suite: Path, section: str, options: dict[str, object], what: str
) -> None:
    change_config(suite / "peer-seed42", section, **options)
    record = read_all([suite])
    assert record.problems == [
        f"main/peer-seed42: E, everything else equal: {what} as in the rest of its suite: left out"
    ]
    (group,) = grouped(record).groups
    assert list(group.variants) == ["air", "hierarchical", "coarse"]


def test_suites_of_other_lengths_are_other_groups(suite: Path, tmp_path: Path) -> None:
    shorter = ["training.steps=200"]
    write_suite(tmp_path / "main", "main", {"air": 60.0}, overrides=shorter)
    record = read_all([suite, tmp_path / "main"])  # both are called main
    assert record.problems == []
    assert [len(group.runs) for group in grouped(record).groups] == [1, 4]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"format": 2}', "has format 2, this airmoe reads 1"),
        ("{", "cannot be read (JSONDecodeError"),
        ('{"format": 1}', "cannot be read (KeyError: 'suite')"),
    ],
)
def test_a_bad_suite_json(suite: Path, good: Path, text: str, part: str) -> None:
    (suite / "suite.json").write_text(text, encoding="utf-8")
    record = read_all([suite, good])
    assert [run.name for run in record.runs] == ["runs/good"]
    (line,) = record.problems
    assert line.startswith("main/suite.json: ") and part in line
