"""What a person sees of a suite: one line per run with the time left, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from airmoe.errors import say, visible
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.plan import PlannedRun
from airmoe.training.display import summary
from airmoe.training.run_folder import read_result
from airmoe.training.run_log import parsed

SHOWN = ("loss", "perplexity", "tokens_per_second")
TAIL_BYTES = 2**16  # some hundred lines
LONGEST = 1e10  # seconds, 300 years: more is a damaged log or no number


@dataclass(frozen=True)
class Pace:
    """Where a run is, by the last line of its log."""

    step: int
    steps: int  # in all
    seconds: float  # until that step

    @property
    def whole(self) -> float:
        """Seconds of the whole run at this speed."""
        return self.seconds / self.step * self.steps

    @property
    def left(self) -> float:
        return self.whole - self.seconds


def last_lines(log: Path) -> list[dict[str, Any]]:
    """The last lines of a log that may be growing, or not there yet; damaged ones are skipped."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            start = file.seek(max(0, size - TAIL_BYTES))
            texts = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    # The first may have been cut by us, and the last is still being written.
    for text in texts[1 if start else 0 : -1]:
        line = parsed(text)
        if line is not None and line["step"] > 0:
            found.append(line)
    return found


def pace_of(lines: Sequence[dict[str, Any]], steps: int) -> Pace | None:
    """None before the first line."""
    return Pace(lines[-1]["step"], steps, lines[-1]["seconds"]) if lines else None


def suite_left(
    finished: Sequence[float], current: Pace | None, waiting: Sequence[Pace | None]
) -> float | None:
    """Seconds until a suite is over, None while nothing is known.

    `finished` are seconds of whole runs. A waiting run takes as long as the known ones do on
    average, less what it did before it was stopped.
    """
    known = [*finished, *([current.whole] if current else [])]
    if not known:
        return None
    shares = sum(1 - pace.step / pace.steps if pace else 1.0 for pace in waiting)
    return (current.left if current else 0.0) + shares * mean(known)


def duration(seconds: float | None) -> str:
    """h:mm:ss, or a question mark."""
    if seconds is None or not 0 <= seconds < LONGEST:
        return "?"
    return str(timedelta(seconds=round(seconds)))


class Board:
    """The runs of a suite: on a terminal the running one is a line updated in place."""

    def __init__(
        self, suite: SuiteFolder, runs: Sequence[PlannedRun], steps: int, console: Console
    ) -> None:
        self._suite, self._runs, self._steps, self._console = suite, runs, steps, console
        self._messages: dict[str, str] = {}  # why runs failed
        self._results: dict[str, dict[str, Any]] = {}

    def already_finished(self, run: PlannedRun) -> None:
        self._say(f"{run.folder}  done before  {self._final_numbers(run)}")

    @contextmanager
    def running(self, run: PlannedRun) -> Iterator[None]:
        """Show a run while it goes on."""
        if not self._console.is_terminal:
            self._say(self.line(run))
            yield
            return
        with Live(
            get_renderable=lambda: Text(self.line(run), no_wrap=True, overflow="ellipsis"),
            console=self._console,
            refresh_per_second=2,
            transient=True,
        ):
            yield

    def ended(self, run: PlannedRun, message: str = "") -> None:
        """The line of a run that is over; `message` says why it failed."""
        if message:
            self._messages[run.folder] = message
        how = f"failed  {message}" if message else f"done  {self._final_numbers(run)}"
        self._say(f"{run.folder}  {how}  {self._time_left()}")

    def stopped(self, run: PlannedRun) -> None:
        self._say(f"Stopped in {run.folder}. Go on with the same command.")

    def line(self, run: PlannedRun) -> str:
        """A run that goes on: how far, how well, how fast, how long to go."""
        lines = self._log(run)
        pace = pace_of(lines, self._steps)
        newest = {
            name: line[name] for line in lines for name in SHOWN if line.get(name) is not None
        }
        parts = [
            run.folder,
            f"step {pace.step if pace else 0}/{self._steps}",
            summary(newest),
            f"{duration(pace.left if pace else None)} left",
            self._time_left(run, pace),
        ]
        return "  ".join(filter(None, parts))

    def summary(self) -> None:
        """The table at the end, and what went wrong."""
        table = Table(title=Text(visible(self._suite.path)))
        for heading in ("variant", "seed", "status", "best perplexity", "minutes"):
            words = heading in ("variant", "status")
            table.add_column(heading, justify="left" if words else "right", no_wrap=True)
        for run in self._runs:
            numbers = ("failed", "-", "-")
            if run.folder not in self._messages:
                result = self._result(run)
                perplexity, minutes = result["best"]["perplexity"], result["seconds"] / 60
                numbers = ("done", f"{perplexity:.2f}", f"{minutes:.1f}")
            table.add_row(run.variant, str(run.seed), *numbers)
        self._console.print(table)
        for folder, message in self._messages.items():
            self._say(f"{folder} failed: {message} (all it printed: {self._suite.printed(folder)})")

    def _say(self, text: str) -> None:
        say(self._console, text)

    def _log(self, run: PlannedRun) -> list[dict[str, Any]]:
        return last_lines(self._suite.run(run.folder) / "log.jsonl")

    def _result(self, run: PlannedRun) -> dict[str, Any]:
        """Read once: it holds the whole log, and a line on a terminal is made twice a second."""
        if run.folder not in self._results:
            self._results[run.folder] = read_result(self._suite.run(run.folder) / "result.json")
        return self._results[run.folder]

    def _final_numbers(self, run: PlannedRun) -> str:
        result = self._result(run)
        step, numbers = result["last"]["step"], {**result["best"], **result}
        shown = summary({name: numbers[name] for name in SHOWN})
        return f"step {step}/{step}  {shown}  took {duration(result['seconds'])}"

    def _time_left(self, current: PlannedRun | None = None, pace: Pace | None = None) -> str:
        """Of the suite, while `current` goes on at that pace."""
        finished: list[float] = []
        waiting: list[Pace | None] = []
        for run in self._runs:
            if run.folder in self._messages:
                continue
            if self._suite.state(run.folder) == "finished":
                finished.append(self._result(run)["seconds"])
            elif run != current or pace is None:
                waiting.append(pace_of(self._log(run), self._steps))
        return f"suite {duration(suite_left(finished, pace, waiting))} left"
