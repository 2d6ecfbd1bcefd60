"""Hand-written words about results whose numbers come from the records.

    AIR ends at {main/air-seed42 perplexity}, {main/air-seed42 perplexity %- main/peer-seed42
    perplexity} from PEER's.

`{RUN FIELD}`: RUN is the file of the record below the folder of the words, without its ending. Two
of them may be joined by ` - ` (difference), ` / ` (ratio) or ` %- ` (difference in per cent of the
second).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from airmoe.errors import ConfigError
from airmoe.experiments.report.metrics import Kind, Summary, unit_of, written
from airmoe.experiments.report.reading import NEVER_RUNS
from airmoe.experiments.report.record import Run, read_record
from airmoe.experiments.report.records import file_of

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
OPERATION = re.compile(r"(?P<first>\S+ .+?) (?P<sign>-|/|%-) (?P<second>\S+ .+)")


def plain(decimals: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{decimals}f}"


def scaled(kind: Kind, name: str = "") -> Callable[[float], str]:
    """In the unit that its size asks for: 22.3 min, 324.1 PFLOPs."""

    def write(value: float) -> str:
        unit = unit_of(kind, [value])
        return f"{written(Summary(value, None, 1), kind, unit)} {unit.name}{name}"

    return write


@dataclass(frozen=True, kw_only=True)
class Field:
    """A number of a run that words may name."""

    read: Callable[[Run], float | None]
    write: Callable[[float], str]
    difference: Callable[[float], str] | None = None  # where it is written otherwise


def _best(name: str, write: Callable[[float], str]) -> Field:
    return Field(read=lambda run: run.best.get(name), write=write)


FIELDS = {
    "perplexity": _best("perplexity", plain(2)),
    "test perplexity": Field(read=lambda run: (run.test or {}).get("perplexity"), write=plain(2)),
    "loss": _best("loss", plain(3)),
    "dead_experts": Field(
        read=lambda run: run.best.get("dead_experts"),
        write=lambda share: f"{100 * share:.1f} %",
        difference=lambda share: f"{100 * share:.1f} percentage points",
    ),
    "unlisted_experts": Field(
        read=lambda run: run.best.get("unlisted_experts"),
        write=lambda share: f"{100 * share:.1f} %",
        difference=lambda share: f"{100 * share:.1f} percentage points",
    ),
    "overlap": _best("overlap", plain(2)),
    "mass_recall": _best("mass_recall", plain(2)),
    "entropy": _best("entropy", plain(2)),
    "seconds": _best("seconds", scaled("seconds")),
    "tokens_per_second": Field(read=lambda run: run.tokens_per_second, write=plain(0)),
    "peak_memory_gib": Field(
        read=lambda run: run.peak_memory_gib, write=lambda value: f"{value:.1f} GiB"
    ),
    "flops": _best("flops", scaled("flops", "FLOPs")),
    "step": _best("step", plain(0)),
}
COMPARABLE = ({"perplexity", "test perplexity"},)  # besides a field with itself


@dataclass(frozen=True)
class Value:
    """A number with the name of its field."""

    field: str
    number: float


def named_runs(folder: Path) -> dict[str, Run]:
    """`main/air-seed42` -> that run; those of a report.json as if each had its file."""
    found: dict[str, Run] = {}
    for path in sorted(folder.rglob("*.json")):
        place = path.relative_to(folder)
        if any(part in NEVER_RUNS or part.startswith(".") for part in place.parts):
            continue
        try:
            runs = read_record(path).runs
        except ConfigError:
            continue  # a report says so
        for run in runs:
            alone = len(runs) == 1 and path.name != "report.json"
            name = place if alone else place.parent / file_of(run)
            found.setdefault(name.with_suffix("").as_posix(), run)
    return found


def filled(text: str, runs: Mapping[str, Run]) -> str:
    """The words with every placeholder replaced by its number."""
    return PLACEHOLDER.sub(lambda found: _number(" ".join(found[1].split()), runs), text)


def _number(placeholder: str, runs: Mapping[str, Run]) -> str:
    operation = OPERATION.fullmatch(placeholder)
    if operation is None:
        value = _value(placeholder, placeholder, runs)
        return FIELDS[value.field].write(value.number)
    first, second = (_value(operation[name], placeholder, runs) for name in ("first", "second"))
    pair = {first.field, second.field}
    if len(pair) > 1 and not any(pair <= fields for fields in COMPARABLE):
        raise _wrong(
            placeholder, f"must compare equal fields, not {first.field} and {second.field}"
        )
    if operation["sign"] != "-" and second.number == 0:
        raise _wrong(placeholder, f"cannot be written, because the second {second.field} is 0")
    return _combined(first, operation["sign"], second)


def _combined(first: Value, sign: str, second: Value) -> str:
    difference, field = first.number - second.number, FIELDS[first.field]
    if sign == "-":
        return (field.difference or field.write)(difference)
    if sign == "/":
        return f"{first.number / second.number:.3g}"
    return f"{100 * difference / second.number:.1f} %"


def _value(operand: str, placeholder: str, runs: Mapping[str, Run]) -> Value:
    name, _, field = operand.partition(" ")
    if field not in FIELDS:
        raise _wrong(placeholder, f"must be RUN FIELD with a field of {', '.join(FIELDS)}")
    if name not in runs:
        raise _wrong(
            placeholder, f"must name one of the runs {', '.join(sorted(runs)) or '(none)'}"
        )
    number = FIELDS[field].read(runs[name])
    if number is None:
        raise _wrong(placeholder, f"cannot be written, because {name} has no {field}")
    return Value(field, number)


def _wrong(placeholder: str, rule: str) -> ConfigError:
    return ConfigError("words", f"{{{placeholder}}}", rule, "Correct the placeholder.")
