"""The log's numbers as TensorBoard events."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError


def check_installed() -> None:
    """Raise where a run with TensorBoard cannot write it."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "training.tensorboard",
            True,
            "needs the package tensorboard, which is not installed",
            "Run: pip install 'airmoe[track]', or set training.tensorboard=false.",
        )


class TensorBoard:
    """`write` takes log lines; events after the step a run resumes from are purged."""

    def __init__(self, folder: Path, first_step: int) -> None:
        check_installed()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name not in ("step", "tokens"):
                self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
