"""A finished run's run.json and result.json -> what a report keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airmoe.experiments.report.fields import from_json
from airmoe.experiments.report.names import method_of
from airmoe.experiments.report.record import (
    EVALUATION_FIELDS,
    OLD_BALANCE,
    TRAINING_FIELDS,
    Run,
    curve,
    number,
)

PATHS = ("corpus", "folder", "validation", "tokenizer")  # options of data that may be paths
TRACKING = ("tensorboard", "track")  # options of training


@dataclass(frozen=True)
class Member:
    """A run, of a suite or none: where it lies, how a report names it, what suite.json says."""

    path: Path
    name: str
    suite: str | None = None
    plan: dict[str, Any] = field(default_factory=dict)


def finished_run(member: Member, about: dict[str, Any], result: dict[str, Any]) -> Run:
    """From run.json (`about`) and result.json; raises where they lack or garble something."""
    start = _start(result["log"])
    lines = [_timed(line, start) for line in result["log"]]
    best, test = _timed(result["best"], start), result.get("test")
    logged = {kind: [one for one in lines if one["kind"] == kind] for kind in ("eval", "train")}
    config, variant = _portable(about["config"]), None
    if member.suite is not None:
        variant = str(member.plan.get("variant", member.path.name))
    values = {
        "name": member.name,
        "suite": member.suite,
        "variant": variant or method_of(config["model"]),
        "seed": config["training"]["seed"],
        "config": config,
        "data_sha256": about.get("data_sha256"),
        **{name: result[name] for name in ("versions", "git", "machine", "parameters", "tokens")},
        "best": _numbers(best),
        "tokens_per_second": number(result["tokens_per_second"]),
        "evaluations": curve(logged["eval"], EVALUATION_FIELDS),
        "training": curve(logged["train"], TRAINING_FIELDS),
        "usage": None,
        "test": None if test is None else _numbers(test),
        "peak_memory_gib": number(result.get("peak_memory_gib")),
        "whole_seconds": number(result.get("seconds")),
        "recipe": about.get("data_recipe"),
        "balance": about.get("balance") or OLD_BALANCE,
    }
    return from_json(Run, values, "run")


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """Settings without the folders of one machine (of an absolute path only the name stays) and
    without those that say where log lines go."""
    data = {
        key: Path(value).name if key in PATHS and str(value).startswith("/") else value
        for key, value in config["data"].items()
    }
    training = {key: value for key, value in config["training"].items() if key not in TRACKING}
    return config | {"data": data, "training": training}


def _numbers(line: dict[str, Any]) -> dict[str, float | None]:
    return {key: number(value) for key, value in line.items() if key != "kind"}


def _start(log: list[dict[str, Any]]) -> float:
    """Time of the first step, where it is logged: what a compiler takes, not the method."""
    first = next((line for line in log if line["kind"] == "train"), {"step": None})
    return number(first.get("training_seconds")) or 0.0 if first["step"] == 1 else 0.0


def _timed(line: dict[str, Any], start: float) -> dict[str, Any]:
    """Time without the start and without evaluations, which cost one method as much as another;
    older logs lack it."""
    if (seconds := number(line.get("training_seconds"))) is not None:
        return line | {"seconds": seconds - start}
    return line | {"seconds": line.get("seconds")}
