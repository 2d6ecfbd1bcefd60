"""A named run with one of the methods and settings of one's own, at an equal budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from airmoe.errors import ConfigError
from airmoe.experiments.presets import preset
from airmoe.experiments.suites.variants import method_variant
from airmoe.files import parse_json
from airmoe.model.methods import check_method
from airmoe.routers import AirRouter
from airmoe.training import RunConfig, override

OPTIONS = "model.router_options"
# AIR's as well, but of its expert choice alone: where given, it is that of the method's own.
ITS_OWN = {"capacity_factor"}
OF_AIR = {field.name for field in dataclasses.fields(AirRouter.Config)} - ITS_OWN


def method_run(name: str, method: str, assignments: Sequence[str] = ()) -> RunConfig:
    """`assignments` (`section.option=value`) are of the run with AIR, and the method is made from
    that, so that the same words mean the same budget for all methods. Only options that AIR does
    not have are of the method's own router."""
    check_method("method", method)
    if method == "air":
        return override(preset(name), assignments)
    of_air, own = _divided(assignments)
    return override(method_variant(_with_air(name, of_air, method), method), own)


def _with_air(name: str, of_air: list[str], method: str) -> RunConfig:
    try:
        return override(preset(name), of_air)
    except ConfigError as error:
        # The preset's lists may not fit other sizes. Only clusters are made from them: for the
        # others lists that follow from the sizes will do.
        if method == "hierarchical" or error.field != f"{OPTIONS}.shortlist_size":
            raise
        return override(preset(name), [f"{OPTIONS}={{}}", *of_air])


def _divided(assignments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the run with AIR, and those of the method's own router, each in their order."""
    of_air: list[str] = []
    own: list[str] = []
    replaced = False  # all options at once by the method's own, which later ones change
    for assignment in assignments:
        path, _, text = assignment.partition("=")
        is_own = False
        if path == OPTIONS:
            is_own = replaced = not _are_of_air(text)
        elif path.startswith(f"{OPTIONS}."):
            is_own = replaced or path.removeprefix(f"{OPTIONS}.") not in OF_AIR
        (own if is_own else of_air).append(assignment)
    return of_air, own


def _are_of_air(text: str) -> bool:
    try:
        given = parse_json(text)
    except ValueError:
        return True  # refused by whoever reads it
    return not isinstance(given, dict) or given.keys() <= OF_AIR
