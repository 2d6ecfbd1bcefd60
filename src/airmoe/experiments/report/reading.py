"""Run folders, suite folders and report.json files -> what a report keeps, problems in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from airmoe.errors import ConfigError
from airmoe.experiments.report.groups import Key, key_of
from airmoe.experiments.report.names import method_of
from airmoe.experiments.report.record import (
    EVALUATION_FIELDS,
    TRAINING_FIELDS,
    Record,
    Run,
    curve,
    number,
    read_record,
)
from airmoe.experiments.report.usage import Usage, read_usage
from airmoe.experiments.suites.folder import FORMAT as SUITE_FORMAT
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.files import read_json
from airmoe.training.checkpoints import USAGE
from airmoe.training.config import RunConfig
from airmoe.training.run_folder import open_run

RUN_FILES = ("run.json", "result.json", "log.jsonl")
NEVER_RUNS = ("tensorboard", "report", "figures")
PATHS = ("corpus", "folder", "validation")  # options of data that may be paths


@dataclass
class Reading:
    """Collects runs and problems; a folder met twice counts once."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    def problem(self, name: str, text: str) -> None:
        """One line, whatever the message was."""
        self.problems.append(f"{name}: {' '.join(text.split())}")


@dataclass(frozen=True)
class Place:
    """A run's part in a suite; a single run has none."""

    suite: str | None = None
    variant: str | None = None


def read_all(paths: Sequence[Path]) -> Record:
    """Everything under `paths`; without any run at all there is nothing to report."""
    reading = Reading()
    for path in paths:
        if path.is_file():
            _read_report(path, reading)
        elif path.is_dir():
            _read_folder(path, path.resolve().name, reading)
        else:
            reading.problem(str(path), "there is no such file or folder")
    if not reading.runs:
        found = f" ({'; '.join(reading.problems)})" if reading.problems else ""
        raise ConfigError(
            "runs",
            ", ".join(map(str, paths)),
            f"must hold at least one finished run{found}",
            "Give run folders, suite folders, or a report.json.",
        )
    return Record(runs=_one_map_each(reading.runs), problems=reading.problems)


def _one_map_each(runs: list[Run]) -> list[Run]:
    """Maps are most of a report.json, and one seed of a variant is drawn: keep the first."""
    drawn: set[tuple[Key, str]] = set()
    kept = []
    for run in runs:
        if run.usage is not None and run.usage.experts.levels is not None:
            place = (key_of(run), run.variant)
            if place in drawn:
                experts = replace(run.usage.experts, levels=None)
                run = replace(run, usage=replace(run.usage, experts=experts))
            drawn.add(place)
        kept.append(run)
    return kept


def _read_report(path: Path, reading: Reading) -> None:
    try:
        record = read_record(path)
    except ConfigError as error:
        reading.problem(path.name, str(error))
        return
    reading.runs += record.runs
    reading.problems += record.problems


def _read_folder(path: Path, name: str, reading: Reading) -> None:
    """A suite, a run, or a folder of them."""
    if path.resolve() in reading.seen:
        return
    reading.seen.add(path.resolve())
    if (path / "suite.json").is_file():
        _read_suite(path, name, reading)
    elif any((path / file).exists() for file in RUN_FILES):
        _read_run(path, name, Place(), reading)
    elif not any(path.iterdir()):
        reading.problem(name, "is empty")
    else:
        for child in _folders(path):
            _read_folder(child, f"{name}/{child.name}", reading)


def _folders(path: Path) -> Iterator[Path]:
    for child in sorted(path.iterdir()):
        hidden = child.name.startswith((".", "checkpoint-")) or child.name in NEVER_RUNS
        if child.is_dir() and not hidden:
            yield child


def _read_suite(path: Path, name: str, reading: Reading) -> None:
    try:
        suite = read_json(path / "suite.json")
        if suite["format"] != SUITE_FORMAT:
            reading.problem(
                f"{name}/suite.json",
                f"has format {suite['format']!r}, this airmoe reads {SUITE_FORMAT}: left out",
            )
            return
        title, listed = str(suite["suite"]), {run["folder"]: run for run in suite["runs"]}
    except (ValueError, KeyError, TypeError) as error:
        reading.problem(f"{name}/suite.json", f"cannot be read ({_short(error)}): left out")
        return
    for folder, run in listed.items():
        place = Place(title, str(run.get("variant", folder)))
        _read_member(path / folder, f"{name}/{folder}", place, reading)
    for child in _folders(path):
        if child.name not in listed and (child / "run.json").exists():
            reading.problem(f"{name}/{child.name}", "is not in suite.json: left out")


def _read_member(path: Path, name: str, place: Place, reading: Reading) -> None:
    """A run of a suite, which may have crashed or not begun."""
    reading.seen.add(path.resolve())
    failed = SuiteFolder(path.parent).failure(path.name)
    if failed.is_file():
        try:
            crash = read_json(failed)
            reason = f"{crash['message']} (exit code {crash['code']})"
        except (ValueError, KeyError, TypeError) as error:
            reason = f"its message cannot be read ({_short(error)})"
        reading.problem(name, f"crashed{_progress(path)}: {reason}")
    elif not path.is_dir():
        reading.problem(name, "has not begun")
    else:
        _read_run(path, name, place, reading)


def _read_run(path: Path, name: str, place: Place, reading: Reading) -> None:
    if not any(path.iterdir()):
        reading.problem(name, "is empty")
        return
    try:
        config = open_run(path).config
    except (ConfigError, TypeError) as error:
        reading.problem(name, str(error).replace(str(path / "run.json"), "run.json"))
        return
    if not (path / "result.json").is_file():
        reading.problem(name, f"is not finished: no result.json{_progress(path, config)}")
        return
    try:
        run = _run(name, place, read_json(path / "run.json"), read_json(path / "result.json"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reading.problem(name, f"result.json cannot be read ({_short(error)}): left out")
        return
    reading.runs.append(replace(run, usage=_usage(path / USAGE, run, reading)))


def _usage(path: Path, run: Run, reading: Reading) -> Usage | None:
    """Of runs that wrote it; one that cannot be read costs the map, not the run."""
    if not path.is_file():
        return None
    try:
        return read_usage(path, run.config)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        reading.problem(run.name, f"{path.name} cannot be read ({_short(error)}): no usage map")
        return None


def _run(name: str, place: Place, about: dict[str, Any], result: dict[str, Any]) -> Run:
    lines, best = [_timed(line) for line in result["log"]], _timed(result["best"])
    evaluations = [line for line in lines if line["kind"] == "eval"]
    training = [line for line in lines if line["kind"] == "train"]
    if number(best["perplexity"]) is None:
        raise ValueError("its best perplexity is no number")
    return Run(
        name=name,
        suite=place.suite,
        variant=place.variant or method_of(about["config"]["model"]),
        seed=about["config"]["training"]["seed"],
        config=_portable(about["config"]),
        data_sha256=about.get("data_sha256"),
        versions=dict(result["versions"]),
        git=dict(result["git"]),
        machine=dict(result["machine"]),
        parameters={kind: result["parameters"][kind] for kind in ("total", "active")},
        best={key: number(value) for key, value in best.items() if key != "kind"},
        tokens=result["tokens"],
        tokens_per_second=number(result["tokens_per_second"]),
        evaluations=curve(evaluations, EVALUATION_FIELDS),
        training=curve(training, TRAINING_FIELDS),
        usage=None,
    )


def _timed(line: dict[str, Any]) -> dict[str, Any]:
    """Time without evaluations, which cost one method as much as another; older logs lack it."""
    return line | {"seconds": line.get("training_seconds", line.get("seconds"))}


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """Without the folders of one machine: of an absolute path only the name stays."""
    data = {
        key: Path(value).name if key in PATHS and str(value).startswith("/") else value
        for key, value in config["data"].items()
    }
    return config | {"data": data}


def _progress(path: Path, config: RunConfig | None = None) -> str:
    """How far an unfinished run came, from its log; its last line may be torn."""
    try:
        lines = (path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ", nothing logged"
    steps = None if config is None else config.training.steps
    of_all = "" if steps is None else f" of {steps}"
    for line in reversed(lines):
        try:
            values = json.loads(line)
            return f", step {values['step']}{of_all}, loss {values['loss']:.3f}"
        except (ValueError, KeyError, TypeError):
            continue
    return ", nothing logged"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
