"""A suite's folder: the plan, one folder per run, what each run printed, and why one failed.

OUT/  suite.json            the plan
      air-seed42/           a run folder (airmoe.training.run_folder)
      air-seed42.txt        what that run printed
      air-seed42.failed.json  message and exit code, until it is tried again
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from airmoe.errors import ConfigError
from airmoe.experiments.suites.plan import Plan, PlannedRun
from airmoe.files import locked, read_json, write_json
from airmoe.training import RunConfig, open_run
from airmoe.training.run_folder import check_free

FORMAT = 1
State = Literal["new", "begun", "finished"]


@dataclass(frozen=True)
class SuiteFolder:
    """Where the parts of a suite lie."""

    path: Path

    @property
    def file(self) -> Path:
        return self.path / "suite.json"

    def run(self, folder: str) -> Path:
        return self.path / folder

    def printed(self, folder: str) -> Path:
        return self.path / f"{folder}.txt"

    def failure(self, folder: str) -> Path:
        return self.path / f"{folder}.failed.json"

    def state(self, folder: str) -> State:
        """How far a run came."""
        if (self.run(folder) / "result.json").exists():
            return "finished"
        return "begun" if (self.run(folder) / "run.json").exists() else "new"


def check_suite(suite: SuiteFolder, plan: Plan) -> None:
    """Raise unless a plan may begin or go on in this folder."""
    if (suite.path / "run.json").exists():
        raise ConfigError(
            "out",
            str(suite.path),
            "must be the folder of a suite, but holds a single run",
            "Give another --out.",
        )
    if suite.file.exists():
        _check_same_suite(suite, plan)
    for run in plan.runs:
        _check_run_folder(suite, run)


def write_plan(suite: SuiteFolder, plan: Plan) -> None:
    suite.path.mkdir(parents=True, exist_ok=True)
    write_json(suite.file, _to_json(plan))


def read_config(suite: SuiteFolder, folder: str) -> RunConfig:
    """The settings of one run of a suite."""
    for run in _read(suite)["runs"]:
        if run["folder"] == folder:
            return RunConfig.from_json(run["config"])
    raise ConfigError("folder", folder, f"must be a run of {suite.file}", "See its runs.")


@contextmanager
def locked_suite(path: Path) -> Iterator[None]:
    """Keep a second command out."""
    path.mkdir(parents=True, exist_ok=True)
    with locked(path, "out", "is being worked on"):
        yield


def differences(before: Any, now: Any) -> str:
    """The keys in which two settings differ, with both values, in words."""
    old, new = flat(before), flat(now)
    missing = "nothing"
    return ", ".join(
        f"{key} = {json.dumps(old[key]) if key in old else missing} (now "
        f"{json.dumps(new[key]) if key in new else missing})"
        for key in sorted(old.keys() | new.keys())
        if key not in old or key not in new or old[key] != new[key]
    )


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as `section.option` -> value."""
    if not isinstance(values, dict) or not values:
        return {path: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{path}.{name}" if path else name)
    return found


def _to_json(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "suite": plan.suite,
        "preset": plan.preset,
        "budget": plan.budget.to_json(),
        "seeds": list(plan.seeds),
        "overrides": list(plan.overrides),
        "runs": [run.to_json() for run in plan.runs],
    }


def _read(suite: SuiteFolder) -> dict[str, Any]:
    try:
        values = read_json(suite.file)
        found = values["format"]
        _ = [values[name] for name in ("suite", "preset", "budget")]
        _ = set(values["seeds"]), {run["folder"]: run["config"] for run in values["runs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "out", str(suite.file), f"must be the plan of a suite ({error})", "Use another --out."
        ) from error
    if found != FORMAT:
        raise ConfigError(
            "suite.format",
            found,
            f"must be {FORMAT}, the format of this airmoe",
            "Use the airmoe version that wrote it, or another --out.",
        )
    return values


def _check_same_suite(suite: SuiteFolder, plan: Plan) -> None:
    """Seeds and methods may be added; everything else must be what it was."""
    before, now = _read(suite), _to_json(plan)
    names = ("suite", "preset", "budget")
    different = differences(*({name: plans[name] for name in names} for plans in (before, now)))
    missing = sorted(set(before["seeds"]) - set(plan.seeds))
    if not different and missing:
        different = f"seeds {before['seeds']} (now {list(plan.seeds)})"
    planned = {run["folder"]: run["config"] for run in now["runs"]}
    for run in before["runs"]:
        if not different and run["folder"] not in planned:
            different = f"run {run['folder']!r} (now no run of it)"
        elif not different:
            different = differences(run["config"], planned[run["folder"]])
    if different:
        raise ConfigError(
            "out",
            str(suite.path),
            f"holds another suite: {different}",
            "Give the settings of its first start (seeds and --also may only be added), or another "
            "--out.",
        )


def _check_run_folder(suite: SuiteFolder, run: PlannedRun) -> None:
    path = suite.run(run.folder)
    if suite.state(run.folder) == "new":
        check_free(path, run.config)
        return
    different = differences(open_run(path).config.to_json(), run.config.to_json())
    if different:
        raise ConfigError(
            "out",
            str(path),
            f"holds a run with other settings: {different}",
            "Give the settings it was made with, or another --out.",
        )
