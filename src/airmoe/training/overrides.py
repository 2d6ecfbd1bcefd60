"""`key.path=value` on top of a run's settings, strictly: a key that does not exist is an error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from airmoe.errors import ConfigError
from airmoe.files import parse_json
from airmoe.training.config import (
    MODEL_OPTIONS,
    DataOptions,
    RunConfig,
    TrainingOptions,
    unknown_option,
)

SHOWN = 60  # characters of a value that cannot be read
SECTIONS: dict[str, tuple[str, ...]] = {
    "model": MODEL_OPTIONS,
    "data": tuple(field.name for field in dataclasses.fields(DataOptions)),
    "training": tuple(field.name for field in dataclasses.fields(TrainingOptions)),
}


def override(run: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """A copy of `run` with `section.option=value` applied in order.

    Values are JSON where they parse as such (numbers, true, null, lists), else plain text.
    `model.router_options.<name>` reaches into the router's own settings.
    """
    values = run.to_json()
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(
                "overrides", assignment, "must look like key.path=value", "Add '=' and a value."
            )
        _assign(values, path.split("."), _parse(path, text))
    return RunConfig.from_json(values)


def _assign(values: dict[str, Any], path: list[str], value: Any) -> None:
    section, *rest = path
    if section not in SECTIONS or not rest:
        raise ConfigError(
            ".".join(path),
            value,
            f"must start with one of {', '.join(SECTIONS)}, then a dot and an option",
            "Write for example training.steps=500.",
        )
    name, *inner = rest
    if name not in SECTIONS[section]:
        raise unknown_option(section, name, value, SECTIONS[section])
    if not inner:
        values[section][name] = value
        if path == ["model", "router"]:
            values["model"]["router_options"] = {}  # another router has other options
        return
    if [section, name] != ["model", "router_options"] or len(inner) > 1:
        raise ConfigError(
            ".".join(path),
            value,
            f"goes too deep: {section}.{name} has no options of its own",
            "Only model.router_options.<name> has a third part.",
        )
    before = values[section].get(name) or {}
    if not isinstance(before, dict):
        raise ConfigError(
            f"{section}.{name}", before, "must map names to values", "Give a JSON object."
        )
    values[section][name] = {**before, inner[0]: value}


def _parse(path: str, text: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        return text
    except ValueError as error:
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        raise ConfigError(path, shown, f"cannot be read: {error}", "Give another value.") from error
