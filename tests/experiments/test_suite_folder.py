"""The folder of a suite: its plan, what may be gone on with, and what may not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from airmoe.errors import ConfigError
from airmoe.experiments.suites import Budget, Plan, make_plan
from airmoe.experiments.suites.execution import _last_words
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.training import RunConfig
from airmoe.training.checkpoints import FORMAT


def open_suite(path: Path, plan: Plan) -> SuiteFolder:
    """As a start of the suite does, without running anything."""
    suite = SuiteFolder(path)
    suite.check(plan)
    suite.write(plan)
    return suite


def test_the_folder_holds_the_plan(tmp_path: Path) -> None:
    plan = make_plan("main", "tiny", ["training.log_every=10"], budget=Budget(epochs=3))
    suite = open_suite(tmp_path / "out", plan)
    values = json.loads((tmp_path / "out" / "suite.json").read_text())
    runs = values.pop("runs")
    assert values == {
        "format": 1,
        "suite": "main",
        "preset": "tiny",
        "budget": {"epochs": 3},
        "seeds": [42],
        "overrides": ["training.log_every=10"],
    }
    assert runs[1] == {
        "folder": "peer-seed42",
        "variant": "peer",
        "seed": 42,
        "config": plan.runs[1].config.to_json(),
    }
    assert suite.config("peer-seed42") == plan.runs[1].config
    with pytest.raises(ConfigError, match="must be a run of"):
        suite.config("nothing")


def test_seeds_and_methods_may_be_added_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    open_suite(out, make_plan("main", "tiny"))
    open_suite(out, make_plan("main", "tiny", num_seeds=2))
    more = open_suite(tmp_path / "more", make_plan("main", "tiny"))
    open_suite(more.path, make_plan("main", "tiny", also=["expert_choice"]))
    with pytest.raises(ConfigError, match="holds another suite"):
        open_suite(more.path, make_plan("main", "tiny"))
    before = (out / "suite.json").read_bytes()
    assert json.loads(before)["seeds"] == [42, 43]
    others = {
        'suite = "main" (now "ablations")': make_plan("ablations", "tiny", num_seeds=2),
        'preset = "tiny" (now "small")': make_plan("main", "small", num_seeds=2),
        "budget = null (now nothing), budget.tokens = nothing (now 5000)": make_plan(
            "main", "tiny", num_seeds=2, budget=Budget(tokens=5000)
        ),
        "seeds [42, 43] (now [42])": make_plan("main", "tiny"),
        "training.learning_rate = 0.002 (now 0.1)": make_plan(
            "main", "tiny", ["training.learning_rate=0.1"], num_seeds=2
        ),
    }
    for difference, plan in others.items():
        with pytest.raises(ConfigError) as caught:
            open_suite(out, plan)
        assert difference in str(caught.value) and "another --out" in str(caught.value)
    assert (out / "suite.json").read_bytes() == before


def test_a_run_with_other_settings_is_not_touched(tmp_path: Path) -> None:
    plan = make_plan("main", "tiny")
    other = make_plan("main", "tiny", ["training.steps=99"]).runs[0].config
    write_run(tmp_path / "air-seed42", other)
    with pytest.raises(ConfigError) as caught:
        open_suite(tmp_path, plan)
    assert "air-seed42" in str(caught.value)
    assert "other settings: training.steps = 99 (now 360)" in str(caught.value)
    assert not (tmp_path / "suite.json").exists()
    write_run(tmp_path / "air-seed42", plan.runs[0].config)
    open_suite(tmp_path, plan)


def write_run(path: Path, config: RunConfig) -> None:
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text(json.dumps({"format": FORMAT, "config": config.to_json()}))


def test_what_a_kill_left_of_a_first_file_is_no_hindrance(tmp_path: Path) -> None:
    plan, run = make_plan("main", "tiny"), tmp_path / "air-seed42"
    run.mkdir()
    (run / "run.json.draft").write_text("{")
    assert open_suite(tmp_path, plan).state("air-seed42") == "new"
    (run / "mine.txt").write_text("somebody's")
    with pytest.raises(ConfigError, match="must be a new or empty folder"):
        open_suite(tmp_path, plan)


def test_a_single_run_is_no_suite(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"out: .* holds a single run\. Give another --out"):
        open_suite(tmp_path, make_plan("main", "tiny"))


def plan_with(**fields: Any) -> str:
    return json.dumps({"format": 1, "suite": "main", "preset": "tiny", "budget": {}, **fields})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "must be the plan of a suite"),
        ("[]", "must be the plan of a suite"),
        ('{"format": 1}', "must be the plan of a suite .'suite'"),
        (plan_with(seeds=[[]], runs=[]), "must be the plan of a suite"),
        (plan_with(seeds=7, runs=[]), "must be the plan of a suite"),
        (plan_with(seeds=[], runs=[{}]), "must be the plan of a suite"),
        (plan_with(seeds=[], runs=[7]), "must be the plan of a suite"),
        (plan_with(seeds=[], runs=[{"folder": [], "config": {}}]), "must be the plan of a suite"),
        (plan_with(format=2, seeds=[], runs=[]), r"suite\.format: got 2, must be 1"),
    ],
)
def test_a_damaged_plan(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(text)
    with pytest.raises(ConfigError, match=part):
        open_suite(tmp_path, make_plan("main", "tiny"))


def test_two_suites_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        SuiteFolder(tmp_path).locked(),
        pytest.raises(ConfigError, match=f"being worked on by process {os.getpid()} on "),
        SuiteFolder(tmp_path).locked(),
    ):
        pass
    with SuiteFolder(tmp_path).locked():
        pass


def test_of_an_error_with_many_lines_the_one_that_names_it_counts(tmp_path: Path) -> None:
    printed = tmp_path / "run.txt"
    printed.write_text(
        "old\nTraceback:\n  a line\ntorch.AcceleratorError: CUDA error: bad\nHint.\n"
    )
    assert _last_words(printed, 0, 1) == "torch.AcceleratorError: CUDA error: bad"
    printed.write_text("airmoe: the disk is full\n")
    assert _last_words(printed, 0, 1) == "the disk is full"
    assert _last_words(printed, 100, 3) == "ended with code 3"
