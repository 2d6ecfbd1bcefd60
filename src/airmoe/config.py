"""Frozen keyword-only settings that refuse what they cannot honour.

`@config` turns a class into a dataclass whose constructor raises `ConfigError` for unknown or
missing names, and whose `check()` method, if it has one, runs after every construction.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import sys
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform, get_args

from airmoe.errors import ConfigError

ConfigClass = TypeVar("ConfigClass", bound=type)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: ConfigClass) -> ConfigClass:
    """Make `cls` a keyword-only frozen dataclass with strict names and a `check()` after init."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    plain_init = made.__init__
    fields = {field.name: field for field in dataclasses.fields(made)}
    required = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def strict_init(self: Any, **values: Any) -> None:
        label = getattr(self, "label", made.__qualname__)
        for name in values:
            if name not in fields:
                raise unknown_option(label, name, values[name], tuple(fields))
        for name in required:
            if name not in values:
                raise ConfigError(
                    f"{label}.{name}", None, "must be given", f"Required: {', '.join(required)}."
                )
        plain_init(self, **values)
        check = getattr(self, "check", None)
        if check is not None:
            check()

    strict_init.__signature__ = inspect.signature(plain_init)  # type: ignore[attr-defined]
    strict_init.__qualname__ = f"{made.__qualname__}.__init__"
    made.__init__ = strict_init
    return made


def check_count(field: str, value: object, *, least: int = 1) -> None:
    """A whole number of at least `least`; booleans and floats are refused, not converted."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(field, value, "must be a whole number", "Give an int.")
    if value < least:
        raise ConfigError(field, value, f"must be >= {least}", f"Give {least} or more.")
    if value.bit_length() > 63:  # torch takes no larger one
        raise ConfigError(field, value, "must be < 2^63", "Give a smaller one.")


def check_number(
    field: str, value: object, *, least: float = 0.0, below: float = math.inf, strict: bool = False
) -> None:
    """A finite real number in [least, below), or (least, below) when `strict`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(field, value, "must be a number", "Give a float.")
    inside = (least < value if strict else least <= value) and value < below
    # math.isfinite would raise for an integer of 400 digits
    if not (abs(value) <= sys.float_info.max and inside):
        low = f"> {least}" if strict else f">= {least}"
        rule = f"must be finite and {low}" + ("" if below == math.inf else f" and < {below}")
        raise ConfigError(field, value, rule, "Choose a value inside that range.")


def can_be_written(text: str) -> bool:
    """Whether a UTF-8 file and a path can hold it, unlike zero bytes and lone surrogates."""
    return "\0" not in text and not any("\ud800" <= one <= "\udfff" for one in text)


def check_text(field: str, value: object) -> None:
    """A text that is not empty and that a file's name can hold."""
    if not isinstance(value, str) or not value:
        raise ConfigError(field, value, "must be a non-empty text", "Give a name or a path.")
    if not can_be_written(value):
        rule = "must be Unicode text without zero bytes, which no file's name can hold"
        raise ConfigError(field, value, rule, "Give another name or path.")


def check_flag(field: str, value: object) -> None:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ConfigError(field, value, "must be True or False", "Give a bool.")


def check_choice(field: str, value: object, literal: object) -> None:
    """One of the strings of a `Literal` type."""
    options = get_args(literal)
    if value not in options:
        listed = ", ".join(repr(option) for option in options)
        remedy = f"{did_you_mean(value, options)}Choose one of these."
        raise ConfigError(field, value, f"must be one of {listed}", remedy)


def unknown_option(path: str, name: str, value: object, valid: tuple[str, ...]) -> ConfigError:
    """The error for a key that does not exist; it names the nearest and lists those that do."""
    remedy = f"{did_you_mean(name, valid)}Valid options: {', '.join(valid)}."
    return ConfigError(f"{path}.{name}", value, "is not an option", remedy)


def did_you_mean(given: object, valid: Iterable[str]) -> str:
    """A sentence naming the valid word that is nearest to a mistyped one, or nothing."""
    near = difflib.get_close_matches(str(given)[:100], list(valid), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""
