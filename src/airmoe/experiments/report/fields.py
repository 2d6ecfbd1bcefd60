"""JSON that people keep, share and change, read as dataclasses: strict, and every refusal names
its field."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from airmoe.config import check_count
from airmoe.errors import ConfigError
from airmoe.files import can_be_written

Natural = Annotated[int, 0]  # whole numbers, with their smallest value
Count = Annotated[int, 1]

LARGEST = 1e100  # a spread over seeds squares its numbers; nothing measured comes near
MOST_BITS = 64  # of an integer: products of three of them still fit in a line
DEEPEST = 8  # objects in objects
LONGEST = 60  # characters of a value in a message


def is_number(value: object) -> TypeGuard[float]:
    """A finite number to calculate with; `math.isfinite` would raise for 400 digits."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -LARGEST <= value <= LARGEST
    )


def brief(value: object) -> object:
    """For a message: a whole list, or a thousand characters, would bury its line."""
    if isinstance(value, list | dict):
        return type(value).__name__
    text = value if isinstance(value, str) else str(value)
    return value if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def from_json(kind: Any, value: Any, path: str) -> Any:
    """`value` as an object of the type `kind`; raises ConfigError where it is none.

    Known are dataclasses, lists, dicts by name, texts, whole and finite numbers, `X | None`, and
    `Any` for whatever can be shown. A dataclass may have a method `check(path)` for the rest.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # X | None
        return None if value is None else from_json(inner[0], value, path)
    if is_dataclass(kind):
        return _object(kind, value, path)
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(path, value, "must be a list", "")
        return [from_json(inner[0], one, f"{path}[{place}]") for place, one in enumerate(value)]
    if origin is dict:
        _check_object(path, value)
        for name in value:
            _check_text(path, name)
        return {name: from_json(inner[1], one, f"{path}.{name}") for name, one in value.items()}
    if origin is Annotated:
        check_count(path, value, least=inner[1])
    elif kind is float:
        if not is_number(value):
            raise ConfigError(path, value, "must be a finite number", "")
    elif kind is str:
        _check_text(path, value)
    else:
        _check_plain(path, value)
    return value


def _object(kind: Any, value: Any, path: str) -> Any:
    _check_object(path, value)
    types = get_type_hints(kind, include_extras=True)
    for name in value:
        if name not in types:
            raise ConfigError(f"{path}.{name}", value[name], "is not a known field", "")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING:
            raise ConfigError(f"{path}.{field.name}", None, "must be given", "")
    found = kind(
        **{name: from_json(types[name], one, f"{path}.{name}") for name, one in value.items()}
    )
    if check := getattr(found, "check", None):
        check(path)
    return found


def _check_object(path: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(path, value, "must be an object", "")


def _check_text(path: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(path, value, "must be a text", "")
    if not can_be_written(value):
        raise ConfigError(path, value, "must be a text that a file can hold", "")


def _check_plain(path: str, value: Any, depth: int = DEEPEST) -> None:
    """Anything that can be shown: texts, numbers, flags, and lists and objects of them."""
    if isinstance(value, dict | list):
        if not depth:
            raise ConfigError(path, value, f"must not be nested deeper than {DEEPEST} times", "")
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            _check_plain(path, name, depth - 1)
            _check_plain(f"{path}.{name}", one, depth - 1)
    elif isinstance(value, str):
        if value:
            _check_text(path, value)
    elif isinstance(value, int):
        if value.bit_length() >= MOST_BITS:
            raise ConfigError(path, value, f"must have less than {MOST_BITS} bits", "")
    elif value is not None and not is_number(value):
        raise ConfigError(path, value, "must be a finite number", "")
