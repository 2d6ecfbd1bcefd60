"""One run folder -> what a report keeps of it; every number that tables need is checked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airmoe.experiments.portable import portable
from airmoe.experiments.report.names import method_of
from airmoe.experiments.report.record import (
    EVALUATION_FIELDS,
    TRAINING_FIELDS,
    Run,
    curve,
    number,
)
from airmoe.experiments.report.run_checks import check_run


@dataclass(frozen=True)
class Place:
    """A run's part in a suite; a single run has none."""

    suite: str | None = None
    variant: str | None = None


def finished_run(name: str, place: Place, about: dict[str, Any], result: dict[str, Any]) -> Run:
    """From run.json (`about`) and result.json; raises where they lack or garble something."""
    start = _start(result["log"])
    lines = [_timed(line, start) for line in result["log"]]
    best = _timed(result["best"], start)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    training = [line for line in lines if line["kind"] == "train"]
    if number(best["perplexity"]) is None:
        raise ValueError("its best perplexity is no number")
    parameters = result["parameters"]
    run = Run(
        name=name,
        suite=place.suite,
        variant=place.variant or method_of(about["config"]["model"]),
        seed=about["config"]["training"]["seed"],
        config=portable(about["config"]),
        data_sha256=about.get("data_sha256"),
        versions=dict(result["versions"]),
        git=dict(result["git"]),
        machine=dict(result["machine"]),
        parameters={
            kind: _count(parameters[kind], f"parameters.{kind}") for kind in ("total", "active")
        },
        best=_numbers(best),
        tokens=_count(result["tokens"], "tokens"),
        tokens_per_second=number(result["tokens_per_second"]),
        evaluations=curve(evaluations, EVALUATION_FIELDS),
        training=curve(training, TRAINING_FIELDS),
        usage=None,
        test=_numbers(test) if (test := result.get("test")) is not None else None,
        peak_memory_gib=number(result.get("peak_memory_gib")),
        whole_seconds=number(result.get("seconds")),
        recipe=about.get("data_recipe"),
        balance=about.get("balance"),
    )
    check_run("run", vars(run))
    return run


def _numbers(line: dict[str, Any]) -> dict[str, float | None]:
    return {key: number(value) for key, value in line.items() if key != "kind"}


def _count(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} is {value!r}, not a count")
    return value


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
