"""What a suite prints: a line per run with the time left, and a table at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from airmoe.training.run_folder import Result, read_result

SHOWN = ("loss", "perplexity", "tokens_per_second")
TAIL_BYTES = 2**16  # some hundred lines


def newest(log: Path) -> dict[str, Any]:
    """The last value of each field in a log that may be growing, or not there yet."""
    found: dict[str, Any] = {}
    lines = log.read_bytes()[-TAIL_BYTES:].split(b"\n") if log.exists() else ()
    for line in lines:
        with suppress(ValueError):  # the first was cut by us, the last is still being written
            found |= json.loads(line)
    return found


def duration(seconds: float | None) -> str:
    """h:mm:ss, or a question mark."""
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))


class Board:
    """The runs of a suite: on a terminal the running one is a line updated in place."""

    def __init__(
        self, suite: SuiteFolder, runs: Sequence[PlannedRun], steps: int, console: Console
    ) -> None:
        self._suite, self._runs, self._steps, self._console = suite, runs, steps, console
        self._failed: dict[str, str] = {}  # folder -> why
        done = [run for run in runs if suite.is_finished(run.folder)]
        self._results = {run.folder: self._result(run) for run in done}

    @contextmanager
    def running(self, run: PlannedRun) -> Iterator[None]:
        """Show a run while it trains."""
        if not self._console.is_terminal:
            say(self._console, self.line(run))
            yield
            return
        with Live(
            get_renderable=lambda: Text(self.line(run), no_wrap=True, overflow="ellipsis"),
            console=self._console,
            refresh_per_second=2,
            transient=True,
        ):
            yield

    def finished(self, run: PlannedRun, how: str = "done") -> None:
        """The line of a run that has its result."""
        result = self._results[run.folder] = self._result(run)
        step, numbers = result["last"]["step"], {**result["best"], **result}
        shown = summary({name: numbers[name] for name in SHOWN})
        took = f"took {duration(result['seconds'])}"
        say(self._console, f"{run.folder}  {how}  step {step}/{step}  {shown}  {took}")

    def failed(self, run: PlannedRun, message: str) -> None:
        self._failed[run.folder] = message
        say(self._console, f"{run.folder}  failed  {message}")

    def stopped(self, run: PlannedRun) -> None:
        say(self._console, f"Stopped in {run.folder}. Go on with the same command.")

    def line(self, run: PlannedRun) -> str:
        """The running run: its step, quality and speed, and the time left."""
        log = newest(self._suite.run(run.folder) / "log.jsonl")
        step, seconds = log.get("step", 0), log.get("seconds")
        whole = seconds and seconds / step * self._steps  # of this run, at this speed
        known = [result["seconds"] for result in self._results.values()]
        known += [whole] if whole else []
        # A run without log lines yet is taken to last as long as the others on average.
        left = (whole or mean(known)) - (seconds or 0.0) if known else None
        waiting = len(self._runs) - len(self._results) - len(self._failed) - 1
        parts = [
            run.folder,
            f"step {step}/{self._steps}",
            summary({name: log[name] for name in SHOWN if name in log}),
            f"{duration(left)} left",
            f"suite {duration(None if left is None else left + waiting * mean(known))} left",
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
            if (result := self._results.get(run.folder)) is not None:
                perplexity, minutes = result["best"]["perplexity"], result["seconds"] / 60
                numbers = ("done", f"{perplexity:.2f}", f"{minutes:.1f}")
            table.add_row(run.variant, str(run.seed), *numbers)
        self._console.print(table)
        for folder, message in self._failed.items():
            say(
                self._console,
                f"{folder} failed: {message} (all it printed: {self._suite.printed(folder)})",
            )

    def _result(self, run: PlannedRun) -> Result:
        return read_result(self._suite.run(run.folder) / "result.json")
