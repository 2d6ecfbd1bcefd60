"""Shows log lines on the terminal, and sends them to a tracker such as TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from airmoe.data import PrepareProgress
from airmoe.errors import say, visible
from airmoe.files import json_sha256
from airmoe.training.config import RunConfig
from airmoe.training.run_log import Line

INSTALL = {"tensorboard": "'airmoe[track]'", "comet_ml": "comet-ml"}  # where pip has another name

# name in the log -> (short name, format)
SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "perplexity": ("ppl", "{:.2f}"),
    "tokens_per_second": ("tok/s", "{:,.0f}"),
    "overlap": ("overlap", "{:.2f}"),
    "dead_experts": ("dead", "{:.1%}"),
    "entropy": ("entropy", "{:.2f}"),
}


def summary(line: Line) -> str:
    """The numbers of a log line that people look at."""
    return "  ".join(
        f"{short} {form.format(line[name])}"
        for name, (short, form) in SHOWN.items()
        if line.get(name) is not None
    )


def _progress(console: Console, *, transient: bool = False) -> Progress:
    """A bar between a title and numbers; nothing if the console is not a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )


class Display:
    """The progress of one run: a bar on a terminal, else a line for every log line."""

    def __init__(self, console: Console, title: str, step: int, last_step: int) -> None:
        self._console, self._title, self._total = console, visible(title), last_step
        self._bar = _progress(console)
        self._task = self._bar.add_task(self._title, total=last_step, count="", numbers="")
        self._bar.start()
        self.advance(step)

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step, count=f"{step}/{self._total}")

    def show(self, line: Line) -> None:
        is_train, numbers = line["kind"] == "train", summary(line)
        if is_train and self._console.is_terminal:
            self._bar.update(self._task, numbers=numbers)
            return
        kind, step = "train" if is_train else "valid", f"{line['step']}/{self._total}"
        say(self._console, f"{self._title}  {kind}  step {step}  {numbers}")

    def close(self) -> None:
        """Also after a failure, or the terminal would stay without a cursor."""
        self._bar.stop()


class PrepareDisplay:
    """A bar while text is prepared; then the number of rows without text."""

    def __init__(self, console: Console, corpus: str) -> None:
        self._console, self._title = console, f"preparing {visible(corpus)}"
        self._skipped: dict[str, int] = {}  # by split
        self._bar, self._task = _progress(console, transient=True), None

    def show(self, progress: PrepareProgress) -> None:
        self._skipped[progress.split] = progress.skipped
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None, count="", numbers="")
        self._bar.update(
            self._task,
            description=f"{self._title}: {progress.split}",
            total=None if progress.fraction is None else 1.0,
            completed=progress.fraction or 0.0,
            numbers=f"{progress.documents:,} documents, {progress.tokens:,} tokens",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if skipped := sum(self._skipped.values()):
            say(self._console, f"skipped {skipped:,} rows without text")


class RunTracker:
    """One of Accelerate's trackers; a resumed run goes on in the same TensorBoard or W&B run.

    One that is not installed is left out and one that fails is switched off; the run goes on.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, config: RunConfig, step: int, console: Console
    ) -> None:
        self._accelerator, self._name, self._console = accelerator, config.training.track, console
        self._is_on = bool(accelerator.log_with)  # Accelerate drops what is not installed
        if not self._is_on:
            package = INSTALL.get(self._name, self._name)
            say(
                console,
                f"training.track={self._name}: left out, because it is not installed (log.jsonl "
                f"has the same numbers). Run: pip install {package}",
            )
        same_run = json_sha256(str(folder.resolve()))[:16]
        options = {
            "tensorboard": {"purge_step": step + 1},  # a resumed run does those again
            "wandb": {"name": folder.name, "dir": str(folder), "id": same_run, "resume": "allow"},
            "mlflow": {"run_name": folder.name},
        }
        # TensorBoard takes the project for its folder in the run, and settings for one more board.
        is_board = self._name == "tensorboard"
        project, settings = ("tensorboard", None) if is_board else ("airmoe", config.to_json())
        self._attempt(lambda: accelerator.init_trackers(project, settings, options))

    def write(self, line: Line) -> None:
        numbers = {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if isinstance(value, int | float) and name not in ("step", "tokens")
        }
        self._attempt(lambda: self._accelerator.log(numbers, step=line["step"]))

    def close(self) -> None:
        """Never raises, because that would hide the error that ends a run."""
        for tracker in self._accelerator.trackers:  # end_training would end the processes
            self._attempt(tracker.finish)

    def _attempt(self, job: Callable[[], Any]) -> None:
        if not self._is_on:
            return
        try:
            job()
        except Exception as error:  # network, login, disk: whatever the package raises
            self._is_on = False
            say(
                self._console,
                f"training.track={self._name} is off for the rest of this run, because it "
                f"failed ({error}). log.jsonl has the same numbers.",
            )
