"""What a person sees of a suite: one line per run with the time left, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from airmoe.errors import visible
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.pace import (
    Countdown,
    Pace,
    duration,
    last_lines,
    pace_of,
    suite_left,
)
from airmoe.experiments.suites.plan import PlannedRun
from airmoe.training.display import say, summary
from airmoe.training.run_folder import read_result

SHOWN = ("loss", "perplexity", "tokens_per_second")


class Board:
    """The runs of a suite: on a terminal the running one is a line updated in place."""

    def __init__(
        self, suite: SuiteFolder, runs: Sequence[PlannedRun], steps: int, console: Console
    ) -> None:
        self._suite, self._runs, self._steps, self._console = suite, runs, steps, console
        self._messages: dict[str, str] = {}  # why runs failed
        self._results: dict[str, dict[str, Any]] = {}
        self._countdown = Countdown()

    def already_finished(self, run: PlannedRun) -> None:
        self._say(f"{run.folder}  done before  {self._final_numbers(run)}")

    @contextmanager
    def running(self, run: PlannedRun) -> Iterator[None]:
        """Show a run while it goes on."""
        self._countdown = Countdown()
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
        lines = last_lines(self._suite.run(run.folder) / "log.jsonl")
        pace = pace_of(lines, self._steps)
        if pace is not None:
            pace = self._countdown.advanced(pace)
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

    def _result(self, run: PlannedRun) -> dict[str, Any]:
        """Read once: it holds the whole log, and a line on a terminal is made twice a second."""
        if run.folder not in self._results:
            self._results[run.folder] = read_result(self._suite.run(run.folder) / "result.json")
        return self._results[run.folder]

    def _final_numbers(self, run: PlannedRun) -> str:
        result = self._result(run)
        best, step = result["best"], result["last"]["step"]
        numbers = {
            "loss": best["loss"],
            "perplexity": best["perplexity"],
            "tokens_per_second": result["tokens_per_second"],
        }
        return f"step {step}/{step}  {summary(numbers)}  took {duration(result['seconds'])}"

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
                log = self._suite.run(run.folder) / "log.jsonl"
                waiting.append(pace_of(last_lines(log), self._steps))
        return f"suite {duration(suite_left(finished, pace, waiting))} left"
