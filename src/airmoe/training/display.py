"""Where else log lines go: to the terminal, and to a tracker such as TensorBoard."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from airmoe.data import PrepareProgress
from airmoe.errors import say, visible
from airmoe.files import KeptStream
from airmoe.training.config import RunConfig, Tracker

Line = dict[str, Any]
PROJECT = "airmoe"  # as trackers call it
INSTALL = {"tensorboard": "'airmoe[track]'", "comet_ml": "comet-ml"}  # names that pip knows

# name in the log -> (short name, format)
SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "perplexity": ("ppl", "{:.2f}"),
    "tokens_per_second": ("tok/s", "{:,.0f}"),
    "overlap": ("overlap", "{:.2f}"),
    "dead_experts": ("dead", "{:.1%}"),
    "entropy": ("entropy", "{:.2f}"),
}


def surviving(console: Console | None) -> Console:
    """This console, or one on standard output, that ignores the loss of its reader."""
    found = copy(console or Console())
    found.file = cast(Any, KeptStream(found.file))
    return found


def summary(line: Line) -> str:
    """The numbers of a log line that people look at."""
    return "  ".join(
        f"{short} {form.format(line[name])}"
        for name, (short, form) in SHOWN.items()
        if line.get(name) is not None
    )


class Display:
    """The progress of one run; `show` is called with every log line."""

    def __init__(self, console: Console, title: str, step: int, last_step: int) -> None:
        self._console, self._title, self._total = console, visible(title), last_step
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[numbers]}"),
                console=console,
            )
            self._progress.start()
            self._task = self._progress.add_task(
                self._title, total=last_step, completed=step, numbers=""
            )

    def advance(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def show(self, line: Line) -> None:
        kind = "valid" if line["kind"] == "eval" else "train"
        if self._progress is not None and line["kind"] == "train":
            self._progress.update(self._task, numbers=summary(line))
            return
        say(
            self._console,
            f"{self._title}  {kind}  step {line['step']}/{self._total}  {summary(line)}",
        )

    def close(self) -> None:
        """Also after a failure, or the terminal would stay without a cursor."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class PrepareDisplay:
    """A bar while text is prepared."""

    def __init__(self, console: Console, corpus: str) -> None:
        self._progress = Progress(
            TextColumn("preparing {task.fields[corpus]}: {task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self._console, self._corpus = console, visible(corpus)
        self._task: Any = None

    def show(self, progress: PrepareProgress) -> None:
        if not self._console.is_terminal:
            return
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("", total=None, numbers="", corpus=self._corpus)
        self._progress.update(
            self._task,
            description=progress.split,
            total=None if progress.fraction is None else 1.0,
            completed=progress.fraction or 0.0,
            numbers=f"{progress.documents:,} documents, {progress.tokens:,} tokens",
        )

    def __enter__(self) -> PrepareDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()
            self._task = None


def is_installed(tracker: Tracker) -> bool:
    return tracker in map(str, get_available_trackers())


def not_installed(tracker: Tracker) -> str:
    """The line that says so; the run goes on without it."""
    return (
        f"training.track={tracker}: left out, because it is not installed (log.jsonl has the same "
        f"numbers). Run: pip install {INSTALL.get(tracker, tracker)}"
    )


class RunTracker:
    """One of Accelerate's trackers; a resumed run goes on in the same TensorBoard or W&B run.

    A tracker that fails is switched off, and the run goes on.
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
