"""A run's log.jsonl: timing, writing and reading its lines."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from airmoe.distributed import rank
from airmoe.errors import ConfigError
from airmoe.files import build, parse_json

Line = dict[str, Any]
TIME_FIELDS = ("seconds", "training_seconds", "tokens_per_second")  # all else repeats exactly
STARTING_STEPS = 8  # not timed in a process that compiles or captures graphs


class Logged(TypedDict):
    """Any line of a log, as far as we read it."""

    kind: str
    step: int
    tokens: int
    loss: float
    seconds: float


class Evaluated(Logged):
    """One with "kind": "eval"."""

    perplexity: float


class Clock:
    """How long a run has taken, with all its parts if it was resumed, and its steps alone.

    The first `starting_steps`, in which compilers and graphs start, are not counted as steps: their
    time says nothing about a method, and differs from one process to the next.
    """

    def __init__(self, *, starting_steps: int = 0) -> None:
        self.training_seconds = 0.0
        self._started, self._starting = time.monotonic(), starting_steps
        self._new_seconds, self._new_steps = 0.0, 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def go_on(self, seconds: float, training_seconds: float) -> None:
        """Continue from the times of a checkpoint."""
        self._started = time.monotonic() - seconds
        self.training_seconds = training_seconds

    @contextmanager
    def step(self, *, then_wait: bool) -> Iterator[None]:
        """Times a training step; `then_wait` for the GPU, before it does something else."""
        started = time.monotonic()
        yield
        if torch.cuda.is_available() and (then_wait or self._starting == 1):
            torch.cuda.synchronize()
        if self._starting:
            self._starting -= 1
            return
        took = time.monotonic() - started
        self.training_seconds += took
        self._new_seconds, self._new_steps = self._new_seconds + took, self._new_steps + 1

    def steps_per_second(self) -> float | None:
        """Of the timed steps since the last call; None if there were none."""
        steps, seconds = self._new_steps, self._new_seconds
        self._new_seconds, self._new_steps = 0.0, 0
        return steps / seconds if seconds > 0 else None


@dataclass
class LogWriter:
    """Appends lines to a run's log, and passes each on to the `sinks`: display, tracker.

    A line is {"kind": "train" | "eval", "step", "epoch", "tokens", numbers ...}.
    """

    path: Path
    clock: Clock
    tokens_per_step: int
    steps_per_epoch: int
    flops_per_token: dict[str, float]
    sinks: list[Callable[[Line], None]]

    def write(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        """Append a line; does nothing on any process but the first."""
        if rank() != 0:
            return
        epoch, place = divmod(step, self.steps_per_epoch)
        tokens = step * self.tokens_per_step
        line: Line = {
            "kind": kind,
            "step": step,
            "epoch": epoch + place / self.steps_per_epoch,
            "tokens": tokens,
            **numbers,
            **{name: tokens * cost for name, cost in self.flops_per_token.items()},
            "seconds": round(self.clock.seconds, 3),
            "training_seconds": round(self.clock.training_seconds, 3),
        }
        if kind == "train" and (speed := self.clock.steps_per_second()) is not None:
            line["tokens_per_second"] = round(speed * self.tokens_per_step, 1)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for sink in self.sinks:
            sink(line)


def read_log(path: Path) -> list[Line]:
    """The lines of a log, if there is one, without a last line that is incomplete."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        return [_line(parse_json(text)) for text in whole.splitlines()]
    except ValueError as error:
        remedy = f"Resume the run, which puts its copy back: airmoe train --resume {path.parent}"
        raise ConfigError("file", str(path), f"cannot be read ({error})", remedy) from error


def _line(values: Any) -> Line:
    line = build(Logged, values)
    return build(Evaluated, line) if line["kind"] == "eval" else line
