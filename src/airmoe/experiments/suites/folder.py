"""A suite's folder: the plan, one folder per run, what each run printed, and why one failed.

OUT/  suite.json            the plan
      air-seed42/           a run folder (airmoe.training.run_folder)
      air-seed42.txt        what that run printed
      air-seed42.failed.json  message and exit code, until it is tried again
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.suites.plan import Plan
from airmoe.files import locked, read_json, write_json
from airmoe.training import RunConfig, open_run


@dataclass(frozen=True)
class SuiteFolder:
    """The files of a suite."""

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

    def is_begun(self, folder: str) -> bool:
        return (self.run(folder) / "run.json").exists()

    def is_finished(self, folder: str) -> bool:
        return (self.run(folder) / "result.json").exists()

    def locked(self) -> AbstractContextManager[None]:
        """Keep other commands out of this folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        return locked(self.path, "out", "is being worked on")

    def check(self, plan: Plan) -> None:
        """Raise unless a plan may begin or go on in this folder."""
        if (self.path / "run.json").exists():
            rule = "must be the folder of a suite, but holds a single run"
            raise ConfigError("out", str(self.path), rule, "Give another --out.")
        if self.file.exists() and (different := _different(self.read(), plan)):
            remedy = (
                "Give the settings of its first start (seeds and --also may only be added), or "
                "another --out."
            )
            raise ConfigError("out", str(self.path), f"holds another suite: {different}", remedy)
        for run in plan.runs:
            path = self.run(run.folder)
            before = open_run(path).config if self.is_begun(run.folder) else run.config
            if different := differences(before.to_json(), run.config.to_json()):
                rule = f"holds a run with other settings: {different}"
                remedy = "Give the settings it was made with, or another --out."
                raise ConfigError("out", str(path), rule, remedy)

    def write(self, plan: Plan) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.file, plan.to_json())

    def read(self) -> Plan:
        try:
            return Plan.from_json(read_json(self.file))
        except (ValueError, KeyError, TypeError) as error:
            rule = f"cannot be read ({type(error).__name__}: {error})"
            raise ConfigError("out", str(self.file), rule, "Use another --out.") from error

    def config(self, folder: str) -> RunConfig:
        return next(run.config for run in self.read().runs if run.folder == folder)


def differences(before: Any, now: Any) -> str:
    """The keys in which two settings differ, with both values, in words."""
    old, new = flat(before), flat(now)

    def written(values: dict[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "nothing"

    return ", ".join(
        f"{key} = {written(old, key)} (now {written(new, key)})"
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


def _different(before: Plan, now: Plan) -> str:
    """What differs, in words; empty if only seeds and methods were added."""
    for name in ("suite", "preset"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            return f"{name} = {old!r} (now {new!r})"
    planned = {run.folder: run.config.to_json() for run in now.runs}
    for run in before.runs:
        if run.folder not in planned:
            return f"run {run.folder!r} (now no run of it)"
        if found := differences(run.config.to_json(), planned[run.folder]):
            return found
    return ""
