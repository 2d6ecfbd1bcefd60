"""How far a run is and how long it will take, read from its log while it grows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

TAIL_BYTES = 2**16  # some hundred lines


@dataclass(frozen=True)
class Pace:
    """Where a run stands."""

    step: int
    steps: int  # in all
    seconds: float  # until that step
    waited: float = 0.0  # since then

    @property
    def whole(self) -> float:
        """Seconds of the whole run at this speed."""
        return self.seconds / self.step * self.steps

    @property
    def left(self) -> float:
        return max(0.0, self.whole - self.seconds - self.waited)


def last_lines(log: Path) -> list[dict[str, Any]]:
    """The last lines of a log that may be growing, or not there yet."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            start = file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    # The first may have been cut by us, and the last is still being written.
    return [line for text in lines[1 if start else 0 : -1] if (line := _line(text)) is not None]


def _line(text: bytes) -> dict[str, Any] | None:
    """None for a damaged one."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and "step" in line else None


def pace_of(lines: Sequence[dict[str, Any]], steps: int) -> Pace | None:
    """None before the first line."""
    return Pace(lines[-1]["step"], steps, lines[-1]["seconds"]) if lines else None


class Countdown:
    """Lets the time left run down between two log lines, which may be minutes apart."""

    def __init__(self) -> None:
        self._step, self._seen_at = -1, 0.0

    def advanced(self, pace: Pace) -> Pace:
        """With the time since its line was first seen, but never beyond the expected end."""
        now = time.monotonic()
        if pace.step != self._step:
            self._step, self._seen_at = pace.step, now
        return replace(pace, waited=min(now - self._seen_at, pace.left))


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
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))
