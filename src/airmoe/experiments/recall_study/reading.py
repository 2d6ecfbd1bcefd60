"""recall.json -> the study in it; a file that was cut or changed is refused, by its field."""

from __future__ import annotations

from typing import Any, TypeGuard

from airmoe.config import check_choice
from airmoe.errors import ConfigError
from airmoe.experiments.json_fields import (
    LARGEST,
    Check,
    between,
    brief,
    check_config,
    check_fields,
    check_filled,
    check_plain_object,
    check_text,
    or_none,
    whole,
)
from airmoe.experiments.recall_study.record import (
    FORMAT,
    KIND,
    LayerRows,
    RecallStudy,
    Row,
    Stage,
)


def is_study(values: object) -> TypeGuard[dict[str, Any]]:
    """Whether the JSON of a file is that of a study."""
    return isinstance(values, dict) and values.get("kind") == KIND


def study_from_json(values: object) -> RecallStudy:
    """What `to_json` gave; raises ConfigError where it is anything else."""
    try:
        return _study(values)
    except ConfigError as error:  # nobody should mend numbers by hand, whatever the rule was
        remedy = "Measure again: airmoe recall RUN."
        raise ConfigError(error.field, brief(error.value), error.rule, remedy) from error


def _study(values: object) -> RecallStudy:
    if not is_study(values):
        raise ConfigError("recall", values, f"must be an object of the kind {KIND!r}", "")
    if values.get("format") != FORMAT:
        rule = f"must be {FORMAT}, the format of this airmoe"
        raise ConfigError("recall.format", values.get("format"), rule, "")
    fields = {name: value for name, value in values.items() if name not in ("kind", "format")}
    check_fields("recall", fields, STUDY, of="a study")
    layers = [_layer(f"recall.layers[{place}]", one) for place, one in enumerate(fields["layers"])]
    return RecallStudy(**{**fields, "layers": layers})


def _layer(path: str, values: Any) -> LayerRows:
    check_fields(path, values, LAYER, of="a study")
    for place, row in enumerate(values["rows"]):
        check_fields(f"{path}.rows[{place}]", row, ROW, of="a study")
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


def _stage(path: str, value: Any) -> None:
    check_text(path, value)
    check_choice(path, value, Stage)


ROW: dict[str, Check] = {
    "stage": _stage,
    "num_codewords": whole(1),
    "shortlist_size": whole(1),
    "probes": whole(1),
    "overlap": between(0, 1),
    "unlisted_experts": between(0, 1),
    "cosine": or_none(between(-1, 1)),
    "products_every_step": or_none(between(0, LARGEST)),
    "products_every_16_steps": or_none(between(0, LARGEST)),
}
LAYER: dict[str, Check] = {
    "layer": check_text,
    "num_experts": whole(1),
    "top_k": whole(1),
    "shortlist_size": whole(1),
    "rows": check_filled,
}
STUDY: dict[str, Check] = {
    "run": check_text,
    "checkpoint": check_text,
    "config": check_config,
    "data": or_none(check_text),
    "data_sha256": check_text,
    "versions": check_plain_object,
    "git": check_plain_object,
    "machine": check_plain_object,
    "seed": whole(0),
    "fit_tokens": whole(1),
    "tokens": whole(1),
    "layers": check_filled,
}
