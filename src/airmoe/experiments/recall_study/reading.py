"""recall.json -> the study in it; a file that was cut or changed is refused, by its field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from airmoe.config import check_choice, check_count
from airmoe.errors import ConfigError
from airmoe.experiments.recall_study.record import (
    FORMAT,
    KIND,
    LayerRows,
    RecallStudy,
    Row,
    Stage,
)
from airmoe.training.config import RunConfig

Check = Callable[[str, Any], None]  # of a field's path and value; raises ConfigError


def is_study(values: object) -> TypeGuard[dict[str, Any]]:
    """Whether the JSON of a file is that of a study."""
    return isinstance(values, dict) and values.get("kind") == KIND


def study_from_json(values: object) -> RecallStudy:
    """What `to_json` gave; raises ConfigError where it is anything else."""
    try:
        return _study(values)
    except ConfigError as error:  # nobody should mend numbers by hand, whatever the rule was
        remedy = "Measure again: airmoe recall RUN."
        raise ConfigError(error.field, _brief(error.value), error.rule, remedy) from error


def _study(values: object) -> RecallStudy:
    if not is_study(values):
        raise ConfigError("recall", values, f"must be an object of the kind {KIND!r}", "")
    if values.get("format") != FORMAT:
        rule = f"must be {FORMAT}, the format of this airmoe"
        raise ConfigError("recall.format", values.get("format"), rule, "")
    fields = {name: value for name, value in values.items() if name not in ("kind", "format")}
    _check_fields("recall", fields, STUDY)
    layers = [_layer(f"recall.layers[{place}]", one) for place, one in enumerate(fields["layers"])]
    return RecallStudy(**{**fields, "layers": layers})


def _layer(path: str, values: Any) -> LayerRows:
    _check_fields(path, values, LAYER)
    for place, row in enumerate(values["rows"]):
        _check_fields(f"{path}.rows[{place}]", row, ROW)
    layer = LayerRows(**{**values, "rows": [Row(**row) for row in values["rows"]]})
    sizes = layer.sizes
    if layer.shortlist_size not in sizes:
        rule = f"must be among the sizes of the rows, {sizes}"
        raise ConfigError(f"{path}.shortlist_size", layer.shortlist_size, rule, "")
    for rows in layer.stages():
        if (found := sorted(row.shortlist_size for row in rows)) != sizes:
            rule = f"must have one row of each size, {sizes}, of {rows[0].name} as of other stages"
            raise ConfigError(f"{path}.rows", str(found), rule, "")
    return layer


def _check_fields(path: str, values: Any, checks: Mapping[str, Check]) -> None:
    _object(path, values)
    for name in values:
        if name not in checks:
            raise ConfigError(f"{path}.{name}", values[name], "is no field of a study", "")
    for name, check in checks.items():
        if name not in values:
            raise ConfigError(f"{path}.{name}", None, "must be given", "")
        check(f"{path}.{name}", values[name])


def _object(path: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(path, value, "must be an object", "")


def _text(path: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(path, value, "must be a text", "")


def _filled(path: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ConfigError(path, value, "must be a list with something in it", "")


def _seed(path: str, value: Any) -> None:
    check_count(path, value, least=0)


def _stage(path: str, value: Any) -> None:
    _text(path, value)
    check_choice(path, value, Stage)


def _between(low: float, high: float) -> Check:
    def check(path: str, value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and low <= value <= high):
            limit = "" if high == math.inf else f" and <= {high}"
            raise ConfigError(path, value, f"must be a finite number >= {low}{limit}", "")

    return check


def _or_none(check: Check) -> Check:
    return lambda path, value: None if value is None else check(path, value)


def _config(path: str, value: Any) -> None:
    try:
        RunConfig.from_json(value)
    except ConfigError as error:
        field = f"{path}.{error.field.removeprefix('config').lstrip('.')}".rstrip(".")
        raise ConfigError(field, error.value, error.rule, "") from error


def _brief(value: object) -> object:
    """A whole list or object would bury the line that it is named in."""
    return type(value).__name__ if isinstance(value, list | dict) else value


ROW: dict[str, Check] = {
    "stage": _stage,
    "num_codewords": check_count,
    "shortlist_size": check_count,
    "probes": check_count,
    "overlap": _between(0, 1),
    "unlisted_experts": _between(0, 1),
    "cosine": _or_none(_between(-1, 1)),
    "products_every_step": _or_none(_between(0, math.inf)),
    "products_every_16_steps": _or_none(_between(0, math.inf)),
}
LAYER: dict[str, Check] = {
    "layer": _text,
    "num_experts": check_count,
    "top_k": check_count,
    "shortlist_size": check_count,
    "rows": _filled,
}
STUDY: dict[str, Check] = {
    "run": _text,
    "checkpoint": _text,
    "config": _config,
    "data": _or_none(_text),
    "data_sha256": _text,
    "versions": _object,
    "git": _object,
    "machine": _object,
    "seed": _seed,
    "fit_tokens": check_count,
    "tokens": check_count,
    "layers": _filled,
}
