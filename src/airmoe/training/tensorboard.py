"""The log's numbers as TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airmoe.errors import ConfigError


class TensorBoard:
    """`write` takes log lines; events after the step a run resumes from are purged."""

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "training.tensorboard",
                True,
                "needs the package tensorboard, which is not installed",
                "Run: pip install 'airmoe[track]', or set training.tensorboard=false.",
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name not in ("step", "tokens"):
                self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
