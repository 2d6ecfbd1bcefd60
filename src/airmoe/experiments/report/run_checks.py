"""What a run of a record must look like, so that no table or figure stumbles over it later."""

from __future__ import annotations

from typing import Any

from airmoe.errors import ConfigError
from airmoe.experiments.json_fields import (
    LARGEST,
    Check,
    between,
    check_config,
    check_fields,
    check_list,
    check_object,
    check_plain_object,
    check_text,
    every,
    or_none,
    whole,
)
from airmoe.experiments.report.usage import ExpertMap, kept_levels

# Options that settings may leave to their defaults, but that records always had and reports read.
READ_OPTIONS = {"data": ("folder",), "training": ("epochs", "steps", "precision", "seed")}


def check_run(path: str, values: Any) -> None:
    """`values`: the JSON of a run, or the fields of one that was just read; raises ConfigError."""
    check_fields(path, values, RUN, of="a run", later=LATER)


def _config(path: str, value: Any) -> None:
    check_config(path, value)
    for section, names in READ_OPTIONS.items():
        for name in names:
            if name not in value[section]:
                raise ConfigError(f"{path}.{section}.{name}", None, "must be given", "")


def _positive(path: str, value: Any) -> None:
    if value == 0:
        raise ConfigError(path, value, "must be above 0, others are divided by it", "")
    between(0, LARGEST)(path, value)


NUMBER = or_none(between(-LARGEST, LARGEST))


def _best(path: str, value: Any) -> None:
    every(NUMBER)(path, value)
    _positive(f"{path}.perplexity", value.get("perplexity"))


def _curve(path: str, value: Any) -> None:
    """Lists of equal length, one of them the steps."""
    check_object(path, value)
    for name, column in value.items():
        check_text(path, name)
        check_list(f"{path}.{name}", column)
        check = or_none(_positive) if name == "perplexity" else NUMBER
        for place, one in enumerate(column):
            check(f"{path}.{name}[{place}]", one)
    if "step" not in value:
        raise ConfigError(f"{path}.step", None, "must be given", "")
    for name, column in value.items():
        if len(column) != len(value["step"]):
            rule = f"must be as many as steps, {len(value['step'])}"
            raise ConfigError(f"{path}.{name}", len(column), rule, "")


def _list_of(check: Check, length: int | None = None) -> Check:
    def check_items(path: str, value: Any) -> None:
        check_list(path, value)
        if length is not None and len(value) != length:
            raise ConfigError(path, value, f"must be a list of {length}", "")
        for place, one in enumerate(value):
            check(f"{path}[{place}]", one)

    return check_items


def _experts(path: str, value: Any) -> None:
    check_fields(path, value, EXPERTS, of="a map of experts")
    if value["levels"] is not None:
        try:
            kept_levels(ExpertMap(**value))
        except ValueError as error:
            rule = f"must be a map of its shape ({error})"
            raise ConfigError(f"{path}.levels", value["levels"], rule, "") from error


def _cells(path: str, value: Any) -> None:
    check_fields(path, value, CELLS, of="usage of codewords")
    if len(value["ranks"]) != len(value["shares"]):
        rule = f"must be as many as ranks, {len(value['ranks'])}"
        raise ConfigError(f"{path}.shares", len(value["shares"]), rule, "")


def _usage(path: str, value: Any) -> None:
    check_fields(path, value, USAGE, of="usage")


def _recipe(path: str, value: Any) -> None:
    """Of a text: the fields that are read; whatever else a prepared folder says of itself may be
    there."""
    check_plain_object(path, value)
    for name, check in RECIPE.items():
        check(f"{path}.{name}", value.get(name))


SHARE = or_none(between(-LARGEST, 1))
EXPERTS: dict[str, Check] = {
    "shape": _list_of(whole(1), length=2),
    "steps": _list_of(whole(1), length=2),
    "levels": or_none(check_text),
    "structure": SHARE,
    "structure_by_chance": SHARE,
}
CELLS: dict[str, Check] = {
    "total": whole(1),
    "perplexity": between(0, LARGEST),
    "ranks": _list_of(whole(1)),
    "shares": _list_of(between(0, 1)),
}
USAGE: dict[str, Check] = {"layer": whole(0), "experts": _experts, "cells": or_none(_cells)}
RECIPE: dict[str, Check] = {
    "corpus": check_text,
    "split_rule": check_text,
    "max_tokens": or_none(whole(1)),
}
COUNTS: dict[str, Check] = {"total": whole(1), "active": whole(1)}
RUN: dict[str, Check] = {
    "name": check_text,
    "suite": or_none(check_text),
    "variant": check_text,
    "seed": whole(0),
    "config": _config,
    "data_sha256": or_none(check_text),
    "versions": every(check_text),
    "git": check_plain_object,
    "machine": check_plain_object,
    "parameters": lambda path, value: check_fields(path, value, COUNTS, of="parameters"),
    "best": _best,
    "tokens": whole(1),
    "tokens_per_second": NUMBER,
    "evaluations": _curve,
    "training": _curve,
    "usage": or_none(_usage),
}
# Files older than these lack them.
LATER: dict[str, Check] = {
    "test": or_none(every(NUMBER)),
    "peak_memory_gib": NUMBER,
    "whole_seconds": NUMBER,
    "recipe": or_none(_recipe),
    "balance": or_none(check_text),
}
