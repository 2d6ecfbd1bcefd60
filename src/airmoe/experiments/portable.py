"""Settings that can be shared: records of runs and of studies keep them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PATHS = ("corpus", "folder", "validation", "tokenizer")  # options of data that may be paths


def portable(config: dict[str, Any]) -> dict[str, Any]:
    """Without the folders of one machine: of an absolute path only the name stays."""
    data = {
        key: Path(value).name if key in PATHS and str(value).startswith("/") else value
        for key, value in config["data"].items()
    }
    return config | {"data": data}
