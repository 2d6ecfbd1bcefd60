"""Log lines for TensorBoard, W&B, MLflow and others: Accelerate's trackers, by name."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from rich.console import Console

from airmoe.errors import say
from airmoe.training.config import RunConfig, Tracker
from airmoe.training.display import Line

PROJECT = "airmoe"
INSTALL = {"tensorboard": "'airmoe[track]'", "comet_ml": "comet-ml"}


def is_installed(tracker: Tracker) -> bool:
    return tracker in map(str, get_available_trackers())


def not_installed(tracker: Tracker) -> str:
    """The line that says so; the run goes on without."""
    return (
        f"training.track={tracker}: left out, because it is not installed (log.jsonl has the same "
        f"numbers). Run: pip install {INSTALL.get(tracker, tracker)}"
    )


class RunTracker:
    """`write` takes log lines; a resumed run goes on in the same TensorBoard or W&B run.

    A copy of the log is not worth a run: a tracker that fails is switched off for the rest of it.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, config: RunConfig, step: int, console: Console
    ) -> None:
        self._accelerator, self._name, self._console = accelerator, config.training.track, console
        self._is_on = True
        same_run = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        options = {
            "tensorboard": {"purge_step": step + 1},  # a resumed run does those again
            "wandb": {"name": folder.name, "dir": str(folder), "id": same_run, "resume": "allow"},
            "mlflow": {"run_name": folder.name},
        }
        # TensorBoard takes the project for its folder in the run, and settings for one more board.
        is_board = self._name == "tensorboard"
        project, settings = ("tensorboard", None) if is_board else (PROJECT, config.to_json())
        with self._switched_off_by_failure():
            accelerator.init_trackers(project, settings, options)

    def write(self, line: Line) -> None:
        numbers = {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if isinstance(value, int | float) and name not in ("step", "tokens")
        }
        if self._is_on:
            with self._switched_off_by_failure():
                self._accelerator.log(numbers, step=line["step"])

    def close(self) -> None:
        """Never raises, because the error that ends a run would be hidden."""
        was_on, self._is_on = self._is_on, False
        if was_on:
            with self._switched_off_by_failure():
                for tracker in self._accelerator.trackers:  # end_training would end the processes
                    tracker.finish()

    @contextmanager
    def _switched_off_by_failure(self) -> Iterator[None]:
        hook = threading.excepthook
        threading.excepthook = lambda _: None  # TensorBoard's thread would print a traceback
        try:
            yield
        except Exception as error:  # network, login, disk: whatever the package raises
            if self._is_on:
                self.close()
                say(
                    self._console,
                    f"training.track={self._name} is off for the rest of this run, because it "
                    f"failed ({error}). log.jsonl has the same numbers.",
                )
        finally:
            threading.excepthook = hook
