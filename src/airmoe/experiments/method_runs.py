"""A named run with one of the methods and settings of one's own, at an equal budget."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from airmoe.experiments.presets import preset
from airmoe.experiments.suites.variants import method_variant
from airmoe.model.methods import check_method
from airmoe.routers import AirRouter
from airmoe.training import RunConfig, override

OPTIONS = "model.router_options"
OF_AIR = {field.name for field in dataclasses.fields(AirRouter.Config)}


def method_run(name: str, method: str, assignments: Sequence[str] = ()) -> RunConfig:
    """`assignments` (`section.option=value`) are of the run with AIR, and the method is made from
    that, so that the same words mean the same budget for all methods. Only options that AIR does
    not have are of the method's own router."""
    check_method("method", method)
    if method == "air":
        return override(preset(name), assignments)
    own = [one for one in assignments if _is_unknown_to_air(one)]
    base = override(preset(name), [one for one in assignments if one not in own])
    return override(method_variant(base, method), own)


def _is_unknown_to_air(assignment: str) -> bool:
    path, _, text = assignment.partition("=")
    if path.startswith(f"{OPTIONS}."):
        return path.removeprefix(f"{OPTIONS}.") not in OF_AIR
    if path != OPTIONS:
        return False
    try:
        given = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(given, dict) and not given.keys() <= OF_AIR
