"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from copy import copy
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from airmoe.data import PrepareProgress
from airmoe.errors import say, visible
from airmoe.files import KeptStream

Line = dict[str, Any]

# name in the log -> (short name, format)
SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "perplexity": ("ppl", "{:.2f}"),
    "tokens_per_second": ("tok/s", "{:,.0f}"),
    "overlap": ("overlap", "{:.2f}"),
    "dead_experts": ("dead", "{:.1%}"),
    "entropy": ("entropy", "{:.2f}"),
}


def kept(console: Console | None) -> Console:
    """This console, or one on standard output, but without a reader training goes on."""
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
    """A bar for the preparation of text, from the first report on; then what was left out."""

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
        self._skipped: dict[str, int] = {}  # rows without text, by split

    def show(self, progress: PrepareProgress) -> None:
        self._skipped[progress.split] = progress.skipped
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
        if skipped := sum(self._skipped.values()):
            say(self._console, f"skipped {skipped:,} rows without text")
            self._skipped.clear()
