"""Hand-written words about results whose numbers come from the records.

    AIR ends at {main/air-seed42 perplexity}, {main/air-seed42 perplexity %- main/peer-seed42
    perplexity} from PEER's.

`{RUN FIELD}`: RUN is the file of the record below the folder of the words, without its ending, or
below the folder of all sections (`wikipedia/main/air-seed42`). Rows of `airmoe recall` are named
alike: `recall/own-g1024-m2048-p1`, of several layers with `-layer3` behind it. A field is of the
best evaluation, in `{RUN FIELD at STEP}` of the one at that step, in `{RUN training FIELD at STEP}`
of that training step. Two of them may be joined by ` / ` (ratio) or ` %- ` (difference in per cent
of the second).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.recall_study.record import RecallStudy, Row
from airmoe.experiments.report.metrics import Kind, Summary, unit_of, written
from airmoe.experiments.report.reading import NEVER_RUNS
from airmoe.experiments.report.record import Run, read_record
from airmoe.experiments.report.records import file_of

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
OPERATION = re.compile(r"(?P<first>\S+ .+?) (?P<sign>/|%-) (?P<second>\S+ .+)")
POINT = re.compile(r"(?P<training>training )?(?P<field>\S+) at (?P<step>[0-9]{1,12})")


def plain(decimals: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{decimals}f}"


def per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"


def scaled(kind: Kind, name: str = "") -> Callable[[float], str]:
    """In the unit that its size asks for: 22.3 min, 324.1 PFLOPs."""

    def write(value: float) -> str:
        unit = unit_of(kind, [value])
        return f"{written(Summary(value, None, 1), kind, unit)} {unit.name}{name}".rstrip()

    return write


@dataclass(frozen=True, kw_only=True)
class Field:
    """A number of a run, or of a row of a study, that words may name."""

    read: Callable[[Any], float | None]
    write: Callable[[float], str]


def _best(name: str, write: Callable[[float], str]) -> Field:
    return Field(read=lambda run: run.best.get(name), write=write)


FIELDS = {
    "perplexity": _best("perplexity", plain(2)),
    "test perplexity": Field(read=lambda run: (run.test or {}).get("perplexity"), write=plain(2)),
    "loss": _best("loss", plain(3)),
    "dead_experts": _best("dead_experts", per_cent),
    "unlisted_experts": _best("unlisted_experts", per_cent),
    "overlap": _best("overlap", plain(2)),
    "mass_recall": _best("mass_recall", plain(2)),
    "entropy": _best("entropy", plain(2)),
    "seconds": _best("seconds", scaled("seconds")),
    "tokens_per_second": Field(read=lambda run: run.tokens_per_second, write=plain(0)),
    "flops": _best("flops", scaled("flops", "FLOPs")),
    "step": _best("step", plain(0)),
    "parameters": Field(read=lambda run: run.parameters.get("total"), write=scaled("count")),
    "active parameters": Field(
        read=lambda run: run.parameters.get("active"), write=scaled("count")
    ),
}
ROW_FIELDS = {
    "overlap": Field(read=lambda row: row.overlap, write=plain(3)),
    "unlisted_experts": Field(read=lambda row: row.unlisted_experts, write=per_cent),
}
MOST_NAMES = 12
COMPARABLE = ({"perplexity", "test perplexity"},)  # besides a field with itself


@dataclass(frozen=True)
class Value:
    """A number with its field."""

    name: str
    field: Field
    number: float


def named_runs(folder: Path) -> dict[str, Run | Row]:
    """`main/air-seed42` -> that run; those of a report.json as if each had its file."""
    found: dict[str, Run | Row] = {}
    for path in sorted(folder.rglob("*.json")):
        place = path.relative_to(folder)
        if any(part in NEVER_RUNS or part.startswith(".") for part in place.parts):
            continue
        try:
            record = read_record(path)
        except ConfigError:
            continue  # a report says so
        for study in record.studies:
            found |= _named_rows(study, place.with_suffix("").as_posix())
        for run in record.runs:
            alone = len(record.runs) == 1 and path.name != "report.json"
            name = place if alone else place.parent / file_of(run)
            found.setdefault(name.with_suffix("").as_posix(), run)
    return found


def _named_rows(study: RecallStudy, file: str) -> dict[str, Row]:
    several = len(study.layers) > 1
    return {
        f"{file}/{row.name}" + (f"-layer{one.layer}" if several else ""): row
        for one in study.layers
        for row in one.rows
    }


def filled(text: str, runs: Mapping[str, Run | Row], file: str) -> str:
    """The words of a file with every placeholder replaced by its number."""
    try:
        return PLACEHOLDER.sub(lambda found: _number(" ".join(found[1].split()), runs), text)
    except ConfigError as error:
        raise ConfigError(file, error.value, error.rule, error.remedy) from error


def _number(placeholder: str, runs: Mapping[str, Run | Row]) -> str:
    operation = OPERATION.fullmatch(placeholder)
    if operation is None:
        value = _value(placeholder, placeholder, runs)
        return value.field.write(value.number)
    first, second = (_value(operation[name], placeholder, runs) for name in ("first", "second"))
    pair = {first.name, second.name}
    if len(pair) > 1 and not any(pair <= fields for fields in COMPARABLE):
        raise _wrong(placeholder, f"must compare equal fields, not {first.name} and {second.name}")
    if second.number == 0:
        raise _wrong(placeholder, f"cannot be written, because the second {second.name} is 0")
    ratio = first.number / second.number
    return f"{ratio:.3g}" if operation["sign"] == "/" else per_cent(ratio - 1)


def _value(operand: str, placeholder: str, runs: Mapping[str, Run | Row]) -> Value:
    name, _, field = operand.partition(" ")
    point = POINT.fullmatch(field)
    if point is not None:
        return _point(name, point, placeholder, runs)
    if field not in FIELDS | ROW_FIELDS:
        raise _wrong(
            placeholder,
            f"must be RUN FIELD with a field of {', '.join(FIELDS | ROW_FIELDS)}, or a point of a "
            "curve, RUN FIELD at STEP or RUN training FIELD at STEP (a step is written 1000); two "
            "of them may be joined by / or %-",
        )
    run = _named(name, placeholder, runs)
    known = (ROW_FIELDS if isinstance(run, Row) else FIELDS).get(field)
    number = None if known is None else known.read(run)
    if known is None or number is None:
        raise _wrong(placeholder, f"cannot be written, because {name} has no {field}")
    return Value(field, known, number)


def _point(
    name: str, point: re.Match[str], placeholder: str, runs: Mapping[str, Run | Row]
) -> Value:
    """A point of a curve. That of a training step is not comparable with an evaluation's."""
    run, field = _named(name, placeholder, runs), FIELDS.get(point["field"])
    curve = {} if isinstance(run, Row) else run.training if point["training"] else run.evaluations
    if field is None or point["field"] not in curve:
        known = sorted(FIELDS.keys() & curve.keys() - {"step"})
        raise _wrong(placeholder, f"must name one of the curves {_listed(known) or '(none)'}")
    points = zip(curve["step"], curve[point["field"]], strict=True)
    numbers = {step: one for step, one in points if step is not None and one is not None}
    number = numbers.get(int(point["step"]))
    if number is None:
        steps = [f"{step:.0f}" for step in numbers]
        raise _wrong(placeholder, f"must name one of the steps {_listed(steps) or '(none)'}")
    return Value(f"{point['training'] or ''}{point['field']}", field, number)


def _named(name: str, placeholder: str, runs: Mapping[str, Run | Row]) -> Run | Row:
    if name not in runs:
        raise _wrong(placeholder, f"must name one of the runs {_listed(sorted(runs)) or '(none)'}")
    return runs[name]


def _listed(names: list[str]) -> str:
    """A dozen at most: a study alone has a hundred rows."""
    more = len(names) - MOST_NAMES
    shown = ", ".join(names[:MOST_NAMES])
    return shown if more <= 0 else f"{shown} and {more} more"


def _wrong(placeholder: str, rule: str) -> ConfigError:
    return ConfigError("words", f"{{{placeholder}}}", rule, "Correct the placeholder there.")
