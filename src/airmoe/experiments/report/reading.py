"""Run folders, suite folders and files of reports -> a record, with a line for each problem."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from airmoe.errors import ConfigError, visible
from airmoe.experiments.report.record import Curve, Numbers, Record, Run, method_of, read_record
from airmoe.experiments.report.usage import read_usage, relative_usage
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.files import build, read_json
from airmoe.losses import BALANCE_CONVENTION
from airmoe.training.checkpoints import USAGE
from airmoe.training.run_folder import open_run

REPORT = "report.json"
NEVER_RUNS = ("tensorboard", "report", "figures")
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, zlib.error)
MOST_POINTS = 600  # of a curve: ten passes of `small`, a point every 100 steps, are whole
ROUTING_FIELDS = (
    *("overlap", "mass_recall", "mass_recall_bound", "dead_experts", "entropy"),
    *("codeword_perplexity", "unlisted_experts"),
)
EVALUATION_FIELDS = (
    *("step", "tokens", "seconds", "flops", "executed_flops", "loss", "perplexity"),
    *ROUTING_FIELDS,
)
# No figure shows the loss; a reader of the record can see whether training was smooth.
TRAINING_FIELDS = ("step", "tokens", "tokens_per_second", "loss", *ROUTING_FIELDS, "staleness")
PATHS = ("corpus", "folder", "validation", "tokenizer")  # options of data that may be paths


def read_all(paths: Sequence[Path]) -> Record:
    """Everything under `paths`; raises where there is no run at all."""
    reader = Reader()
    for path in paths:
        reader.read(path, visible(path.resolve().name))
    if not reader.runs:
        found = f" ({'; '.join(reader.problems)})" if reader.problems else ""
        rule = f"must hold at least one finished run{found}"
        remedy = "Give run folders, suite folders, or a report.json."
        raise ConfigError("runs", ", ".join(map(str, paths)), rule, remedy)
    return Record(runs=reader.runs, problems=reader.problems)


@dataclass
class Reader:
    """Collects runs and problems; a folder or file met twice counts once."""

    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    def read(self, path: Path, name: str) -> None:
        """A file of a report, a suite, a run, or a folder of them."""
        if path.resolve() in self.seen:
            return
        self.seen.add(path.resolve())
        with self._named(name):
            if not path.exists():
                self._problem(str(path), "there is no such file or folder")
            elif path.is_file():
                record = read_record(path)
                for run in record.runs:
                    _ = run.usage and relative_usage(run.usage)  # raises where it cannot be drawn
                self.runs += record.runs
                self.problems += record.problems
            elif (path / "suite.json").is_file():
                self._read_suite(path, name)
            elif (path / "run.json").is_file():
                self._read_run(path, name)
            elif below := _below(path):
                for child in below:
                    self.read(child, f"{name}/{visible(child.name)}")
            else:
                self._problem(name, "holds no run")

    def _problem(self, name: str, text: str) -> None:
        """Add a problem, as one line."""
        self.problems.append(visible(f"{name}: {' '.join(text.split())}"))

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Turn an error about a file into a problem."""
        try:
            yield
        except ConfigError as error:
            self._problem(name, str(error))
        except UNREADABLE as error:
            self._problem(name, f"cannot be read ({type(error).__name__}: {error})")

    def _read_suite(self, path: Path, name: str) -> None:
        """Its finished runs; a problem for each run that crashed, was stopped or has not begun."""
        suite = SuiteFolder(path)
        plan = suite.read()
        for run in plan.runs:
            folder = run.folder
            below, failure = f"{name}/{folder}", suite.failure(folder)
            self.seen.add(suite.run(folder).resolve())
            with self._named(below):
                if suite.is_finished(folder):
                    self._read_run(suite.run(folder), below, plan.suite, run.variant)
                elif failure.is_file():
                    crash = read_json(failure)
                    self._problem(below, f"crashed: {crash['message']} (exit code {crash['code']})")
                elif suite.is_begun(folder):
                    self._problem(below, "is not finished")
                else:
                    self._problem(below, "has not begun")
        for other in _below(path):
            if other.resolve() not in self.seen and other.is_dir():
                self._problem(f"{name}/{other.name}", "is not in suite.json: left out")

    def _read_run(
        self, path: Path, name: str, suite: str | None = None, variant: str | None = None
    ) -> None:
        about = open_run(path).started
        if not (path / "result.json").is_file():
            self._problem(name, "is not finished")
            return
        numbers = finished_run(about, read_json(path / "result.json"))
        model = numbers["config"]["model"]
        usage = read_usage(path / USAGE, model) if (path / USAGE).is_file() else None
        named = {"name": name, "suite": suite, "variant": variant or method_of(model)}
        self.runs.append(build(Run, {**named, "usage": usage, **numbers}))


def _below(path: Path) -> list[Path]:
    """The folders and records in a folder, but not the report.json of a report."""
    return [
        child
        for child in sorted(path.iterdir())
        if not child.name.startswith((".", "checkpoint-"))
        and (
            child.name not in NEVER_RUNS
            if child.is_dir()
            else child.suffix == ".json" and child.name != REPORT
        )
    ]


def finished_run(about: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Fields of a Run, from run.json (`about`) and result.json."""
    if about.get("balance") != BALANCE_CONVENTION:
        raise ValueError("its balance loss is the old one, K times weaker than today's")
    start = _start(result["log"])
    lines = [_timed(line, start) for line in result["log"]]
    logged = {kind: [one for one in lines if one["kind"] == kind] for kind in ("eval", "train")}
    best, test = _numbers(_timed(result["best"], start)), result["test"]
    config = portable(about["config"])
    return {
        "seed": config["training"]["seed"],
        "config": config,
        "data_sha256": about["data_sha256"],
        "recipe": about["data_recipe"],
        **{key: result[key] for key in ("versions", "git", "machine", "parameters", "tokens")},
        "best": best,
        "tokens_per_second": result["tokens_per_second"],
        "evaluations": curve(logged["eval"], EVALUATION_FIELDS),
        "training": curve(logged["train"], TRAINING_FIELDS),
        "test": None if test is None else _numbers(test),
        "peak_memory_gib": result["peak_memory_gib"],
        "whole_seconds": result["seconds"],
    }


def portable(config: dict[str, Any]) -> dict[str, Any]:
    """Settings without the folders of one machine, and without where log lines go.

    Of an absolute path only the name stays.
    """
    data = {
        key: Path(value).name if key in PATHS and str(value).startswith("/") else value
        for key, value in config["data"].items()
    }
    training = {key: value for key, value in config["training"].items() if key != "track"}
    return config | {"data": data, "training": training}


def _numbers(line: dict[str, Any]) -> Numbers:
    return {key: number(value) for key, value in line.items() if key != "kind"}


def _start(log: list[dict[str, Any]]) -> float:
    """Time of the first step, where it is logged: it goes into compiling, not into the method."""
    first = next((line for line in log if line["kind"] == "train"), {"step": None})
    return 0.0 if first["step"] != 1 else first.get("training_seconds") or 0.0


def _timed(line: dict[str, Any], start: float) -> dict[str, Any]:
    """Time of the steps after the first, without evaluations, which cost all methods alike."""
    seconds = line.get("training_seconds")
    return line | {"seconds": None if seconds is None else seconds - start}


def curve(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> Curve:
    """The fields of log lines as columns, thinned evenly; first and last line stay."""
    kept = lines
    if len(lines) > MOST_POINTS:
        last = len(lines) - 1
        kept = [lines[round(place * last / (MOST_POINTS - 1))] for place in range(MOST_POINTS)]
    columns = {name: [number(line.get(name)) for line in kept] for name in names}
    return {
        name: values
        for name, values in columns.items()
        if name == "step" or any(value is not None for value in values)
    }


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
