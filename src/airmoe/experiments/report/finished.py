"""A finished run's run.json and result.json -> what a report keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airmoe.experiments.report.record import (
    OLD_BALANCE,
    Curve,
    Numbers,
    Run,
    from_json,
    is_number,
    method_of,
)

MOST_POINTS = 600  # of a curve: ten passes of `small`, a point every 100 steps, are whole
ROUTING_FIELDS = (
    "overlap",
    "mass_recall",
    "mass_recall_bound",
    "dead_experts",
    "entropy",
    "codeword_perplexity",
    "unlisted_experts",
)
EVALUATION_FIELDS = (
    *("step", "tokens", "seconds", "flops", "executed_flops", "loss", "perplexity"),
    *ROUTING_FIELDS,
)
# No figure shows the loss: it is for readers who want to know whether training was smooth.
TRAINING_FIELDS = ("step", "tokens", "tokens_per_second", "loss", *ROUTING_FIELDS, "staleness")
PATHS = ("corpus", "folder", "validation", "tokenizer")  # options of data that may be paths


@dataclass(frozen=True)
class Member:
    """A run, of a suite or none: where it lies, how a report names it, what suite.json says."""

    path: Path
    name: str
    suite: str | None = None
    plan: dict[str, Any] = field(default_factory=dict)


def finished_run(member: Member, about: dict[str, Any], result: dict[str, Any]) -> Run:
    """From run.json (`about`) and result.json; raises where something is missing or wrong."""
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
    return number(first.get("training_seconds")) or 0.0 if first["step"] == 1 else 0.0


def _timed(line: dict[str, Any], start: float) -> dict[str, Any]:
    """Time of the steps after the first, without evaluations, which cost all methods alike."""
    seconds = number(line.get("training_seconds"))
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
    return value if is_number(value) else None
