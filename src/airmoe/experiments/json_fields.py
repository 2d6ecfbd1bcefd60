"""Checks of JSON that people keep, share and change: each raises ConfigError with the field's path.

They leave the remedy to who reads the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from airmoe.config import check_count
from airmoe.errors import ConfigError
from airmoe.files import can_be_written
from airmoe.training.config import RunConfig

Check = Callable[[str, Any], None]  # of a field's path and value

# A spread over seeds squares its numbers: far larger ones overflow. Nothing measured comes near.
LARGEST = 1e100
MOST_BITS = 64  # of an integer: products of three of them are still written in a line
DEEPEST = 8  # objects in objects
LONGEST = 60  # characters of a value in a message


def is_number(value: object) -> TypeGuard[float]:
    """A finite number to calculate with; `math.isfinite` would raise for 400 digits."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST <= value <= LARGEST
    )


def check_fields(
    path: str, values: Any, checks: Mapping[str, Check], of: str, later: Mapping[str, Check] = {}
) -> None:
    """An object with these fields and no other; it may lack those of `later`."""
    check_object(path, values)
    known = {**checks, **later}
    for name in values:
        if name not in known:
            raise ConfigError(f"{path}.{name}", values[name], f"is no field of {of}", "")
    for name, check in known.items():
        if name in values:
            check(f"{path}.{name}", values[name])
        elif name in checks:
            rule = f"must be given, {of} that lacks or misnames a field is not read"
            raise ConfigError(f"{path}.{name}", None, rule, "")


def check_object(path: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(path, value, "must be an object", "")


def check_list(path: str, value: Any) -> None:
    if not isinstance(value, list):
        raise ConfigError(path, value, "must be a list", "")


def check_filled(path: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ConfigError(path, value, "must be a list with something in it", "")


def check_text(path: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(path, value, "must be a text", "")
    if not can_be_written(value):
        raise ConfigError(path, value, "must be a text that a file can hold", "")


def whole(least: int) -> Check:
    def check(path: str, value: Any) -> None:
        check_count(path, value, least=least)

    return check


def _check_bits(path: str, value: int) -> None:
    if value.bit_length() >= MOST_BITS:
        raise ConfigError(path, value, f"must have less than {MOST_BITS} bits", "")


def between(low: float, high: float) -> Check:
    def check(path: str, value: Any) -> None:
        if not (is_number(value) and low <= value <= high):
            limit = f" and <= {high}" if high < LARGEST else ""
            least = f" >= {low}" if low > -LARGEST else ""
            raise ConfigError(path, value, f"must be a finite number{least}{limit}", "")

    return check


def or_none(check: Check) -> Check:
    return lambda path, value: None if value is None else check(path, value)


def every(check: Check) -> Check:
    """Of an object: each of its values."""

    def check_values(path: str, value: Any) -> None:
        check_object(path, value)
        for name, one in value.items():
            check_text(path, name)
            check(f"{path}.{name}", one)

    return check_values


def check_plain(path: str, value: Any, depth: int = DEEPEST) -> None:
    """Anything that can be shown: texts, numbers, flags, and lists and objects of them."""
    if isinstance(value, dict | list):
        if not depth:
            raise ConfigError(path, value, f"must not be nested deeper than {DEEPEST} times", "")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, one in items:
            check_plain(path, name, depth - 1)
            check_plain(f"{path}.{name}", one, depth - 1)
    elif isinstance(value, str):
        if value:
            check_text(path, value)
    elif isinstance(value, int):
        _check_bits(path, value)
    elif value is not None and not is_number(value):
        raise ConfigError(path, value, "must be a finite number", "")


def check_plain_object(path: str, value: Any) -> None:
    check_object(path, value)
    check_plain(path, value)


def check_config(path: str, value: Any) -> None:
    """The settings of a run that this airmoe knows."""
    check_plain(path, value)
    try:
        RunConfig.from_json(value)
    except ConfigError as error:
        field = f"{path}.{error.field.removeprefix('config').lstrip('.')}".rstrip(".")
        raise ConfigError(field, error.value, error.rule, "") from error


def brief(value: object) -> object:
    """For a message: a whole list or object, or a thousand characters, would bury its line."""
    if isinstance(value, list | dict):
        return type(value).__name__
    text = value if isinstance(value, str) else str(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST]}..."
