"""The errors users meet: what was given or happened, which rule it breaks, what to do."""

from __future__ import annotations

import importlib
from typing import Any, Self


def visible(text: object) -> str:
    """Text that is safe to print: what is not printable is escaped, as `repr` does."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in str(text)
    )


def say(console: Any, text: str) -> None:
    """Print one line literally: names may hold escape codes, or what rich takes for markup."""
    console.print(visible(text), highlight=False, markup=False, soft_wrap=True)


class ConfigError(ValueError):
    """An impossible setting or input: names field, value, rule and remedy."""

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        self.field, self.value, self.rule, self.remedy = field, value, rule, remedy
        super().__init__(visible(f"{field}: got {_shown(value)}, {rule}. {remedy}"))

    def __reduce__(self) -> tuple[type[Self], tuple[str, object, str, str]]:
        # Exceptions are rebuilt from `args` by default; worker processes need all four parts.
        return type(self), (self.field, self.value, self.rule, self.remedy)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # Python writes no integer of over 4,300 digits
        return f"{type(value).__name__} too large to be shown"


class RunError(RuntimeError):
    """A run had to stop (loss not finite, disk full): says where, what is kept, what to do."""


def require(module: str, purpose: str, extra: str = "data") -> Any:
    """Import a module that only some uses need, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but something inside it is missing
        rule = f"is not installed, but is needed {purpose}"
        remedy = f"Run: pip install 'airmoe[{extra}]'"
        raise ConfigError("python package", package, rule, remedy) from None
