"""Packages that only some uses need: imported when used, and asked for by name when missing."""

from __future__ import annotations

import importlib
from typing import Any

from airmoe.errors import ConfigError


def require(module: str, purpose: str) -> Any:
    """Import `module`, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, something inside it is not: not ours to explain
        raise ConfigError(
            "python package",
            package,
            f"is not installed, but is needed {purpose}",
            "Run: pip install 'airmoe[data]'",
        ) from None
