"""Run folders, suites and records -> a record; what cannot be read is a line, the rest stays."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from airmoe.experiments.report import rendering
from airmoe.experiments.report.reading import MOST_POINTS, read_all
from airmoe.experiments.report.record import Run, write_record
from airmoe.experiments.report.rendering import make_report, render
from airmoe.files import read_json, write_json
from tests.experiments.report_toys import write_run, write_usage


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    """A finished run with other values in a file."""

    def make(run: Path) -> None:
        write_run(run)
        write_json(run / file, read_json(run / file) | values)

    return make


def torn(file: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        write_run(run)
        (run / file).write_text('{"best"', encoding="utf-8")

    return make


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda run: write_run(run, result=False), "is not finished"),
        (Path.mkdir, "holds no run"),
        (lambda run: (run / "checkpoint-60").mkdir(parents=True), "holds no run"),
        (changed("run.json", format=7), "format: got 7, must be 2, the format of this airmoe"),
        (changed("run.json", balance=None), "cannot be read (ValueError: its balance loss is the"),
        (torn("suite.json"), "suite.json', cannot be read"),
        (torn("run.json"), "run.json', cannot be read"),
        (torn("result.json"), "cannot be read (JSONDecodeError"),
        (torn("usage.safetensors"), "cannot be read (SafetensorError"),
        (changed("result.json", log=None), "cannot be read (TypeError"),
        (
            lambda run: write_run(run, perplexity=float("nan")),
            "cannot be read (ValueError: its best evaluation has no finite perplexity)",
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_one_line(
    good: Path, make: Callable[[Path], None], line: str
) -> None:
    make(good / "odd")
    record = read_all([good])
    assert [run.name for run in record.runs] == ["runs/good"]
    (found,) = record.problems
    assert found.startswith("runs/odd: ") and line in found and "\n" not in found


def test_paths_that_are_not_there_or_given_twice(good: Path) -> None:
    record = read_all([good, good / "good", good, good / "nowhere"])
    assert len(record.runs) == 1
    assert record.problems == [f"{good / 'nowhere'}: there is no such file or folder"]


def test_runs_of_a_suite_that_crashed_or_have_not_begun(suite: Path) -> None:
    for variant in ("air", "peer"):  # air was tried again since
        write_json(suite / f"{variant}-seed42.failed.json", {"message": "disk full", "code": 1})
    (suite / "peer-seed42" / "result.json").unlink()
    (suite / "hierarchical-seed42" / "result.json").unlink()
    shutil.rmtree(suite / "coarse-seed42")
    shutil.copytree(suite / "air-seed42", suite / "air-old")
    record = read_all([suite.parent])
    assert [(run.suite, run.variant) for run in record.runs] == [("main", "air")]
    assert record.problems == [
        "suites/main/peer-seed42: crashed: disk full (exit code 1)",
        "suites/main/hierarchical-seed42: is not finished",
        "suites/main/coarse-seed42: has not begun",
        "suites/main/air-old: is not in suite.json: left out",
    ]


def test_paths_of_a_machine_do_not_get_into_a_report(tmp_path: Path) -> None:
    paths = ["data.folder=/somewhere/else/tokens", "data.corpus=/x/y.txt"]
    write_run(tmp_path / "run", [*paths, "data.tokenizer=/x/tokenizer.model"])
    (run,) = read_all([tmp_path]).runs
    found = [run.config["data"][name] for name in ("folder", "corpus", "tokenizer")]
    assert found == ["tokens", "y.txt", "tokenizer.model"]


def test_time_is_without_the_first_step(good: Path) -> None:
    """There compilers work: 40 s in one run and 5 in another that finds their work done."""
    result = read_json(good / "good" / "result.json")
    lines = [line | {"training_seconds": 40.0 + line["step"]} for line in result["log"]]
    begin = {"kind": "train", "step": 1, "tokens": 512, "loss": 7.0, "training_seconds": 41.0}
    best = result["best"] | {"training_seconds": 40.0 + result["best"]["step"]}
    changed = result | {"log": [begin, *lines], "best": best}
    write_json(good / "good" / "result.json", changed)
    (run,) = read_all([good]).runs
    assert run.best["seconds"] == run.evaluations["seconds"][-1] == best["step"] - 1
    write_json(good / "good" / "result.json", changed | {"log": lines})  # not logged
    (run,) = read_all([good]).runs
    assert run.best["seconds"] == 40.0 + best["step"]


def test_curves_are_thinned_and_have_finite_numbers(good: Path) -> None:
    values = read_json(good / "good" / "result.json")
    line = next(line for line in values["log"] if line["kind"] == "train")
    values["log"] = [line | {"step": step} for step in range(1000)]
    values["log"][0]["overlap"] = float("inf")
    write_json(good / "good" / "result.json", values)
    (run,) = read_all([good]).runs
    steps = run.training["step"]
    assert len(steps) == MOST_POINTS < 1000 and (steps[0], steps[-1]) == (0, 999)
    assert run.training["overlap"][0] is None and "staleness" not in run.training


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be read (Expecting property name"),
        ('{"format": 2}', "its format is 2, that of this airmoe 3"),
        ('{"format": 3, "runs": [{}], "problems": []}', "runs.0 lacks best"),
    ],
)
def test_a_bad_record(good: Path, text: str, part: str) -> None:
    (good / "notes.json").write_text(text, encoding="utf-8")
    record = read_all([good])
    assert len(record.runs) == 1
    (line,) = record.problems
    assert line.startswith("runs/notes.json: record: got ") and part in line
    assert line.endswith("Write it again from its runs.")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Run)])
def test_a_record_changed_by_hand_is_reported_or_left_out(
    field: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "can_draw", lambda: False)
    write_usage(good / "good", np.arange(4096))
    write_record(read_all([good]), tmp_path / "one.json")
    values = read_json(tmp_path / "one.json")
    for wrong in (None, "x", [1], {}, {"a": 1}, -1, math.nan, 10**400):
        values["runs"][0][field] = wrong
        write_json(tmp_path / "one.json", values)
        record = read_all([good, tmp_path / "one.json"])
        assert len(record.runs) + len(record.problems) == 2
        assert "60.00" in render(make_report(record), "html")


def test_a_record_with_settings_of_another_version(good: Path, tmp_path: Path) -> None:
    write_record(read_all([good]), tmp_path / "one.json")
    values = read_json(tmp_path / "one.json")
    values["runs"][0]["config"]["training"]["hurry"] = True
    (tmp_path / "one.json").write_text(json.dumps(values), encoding="utf-8")
    (line,) = read_all([tmp_path / "one.json", good]).problems
    assert line.startswith("one.json: record: got ") and "hurry" in line
