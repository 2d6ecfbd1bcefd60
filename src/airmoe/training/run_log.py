"""A run's log.jsonl: timed, written, read, and restored from a checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from airmoe.errors import ConfigError
from airmoe.files import parse_json, write_bytes
from airmoe.training.checkpoints import LOG

Line = dict[str, Any]
TIME_FIELDS = ("seconds", "training_seconds", "tokens_per_second")  # the rest repeats exactly
STARTING_STEPS = 8  # of a process that compiles or captures graphs: they are not timed


class Clock:
    """How long a run has taken, resumed parts included: as a whole, and its steps alone.

    The first `starting_steps`, in which compilers and graphs start, count for the whole only: that
    time says nothing about a method, and differs from one process to the next.
    """

    def __init__(self, *, starting_steps: int = 0) -> None:
        self.training_seconds = 0.0
        self._started, self._before = time.monotonic(), 0.0
        self._starting = starting_steps
        self._new_seconds, self._new_steps = 0.0, 0

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def go_on(self, seconds: float, training_seconds: float) -> None:
        """Continue from the times of a checkpoint."""
        self._started, self._before = time.monotonic(), seconds
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


class LogWriter:
    """Adds lines to a run's log, and hands each to the `sinks`: display, tracker.

    A line is {"kind": "train" | "eval", "step", "epoch", "tokens", numbers ...}.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        tokens_per_step: int,
        steps_per_epoch: int,
        flops_per_token: dict[str, float],
        sinks: list[Callable[[Line], None]],
    ) -> None:
        self._path, self._clock, self._sinks = path, clock, sinks
        self._tokens_per_step, self._steps_per_epoch = tokens_per_step, steps_per_epoch
        self._flops_per_token = flops_per_token

    def write(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        epoch, place = divmod(step, self._steps_per_epoch)
        tokens = step * self._tokens_per_step
        line: Line = {
            "kind": kind,
            "step": step,
            "epoch": epoch + place / self._steps_per_epoch,
            "tokens": tokens,
            **numbers,
            **{name: tokens * cost for name, cost in self._flops_per_token.items()},
            "seconds": round(self._clock.seconds, 3),
            "training_seconds": round(self._clock.training_seconds, 3),
        }
        if kind == "train" and (speed := self._clock.steps_per_second()) is not None:
            line["tokens_per_second"] = round(speed * self._tokens_per_step, 1)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for sink in self._sinks:
            sink(line)


def read_log(path: Path) -> list[Line]:
    """The lines of a run's log."""
    texts = path.read_bytes().split(b"\n") if path.is_file() else []
    return [line for text in texts if (line := parsed(text)) is not None]


def parsed(text: bytes) -> Line | None:
    """A line of a log, or None if it is not one."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or line.get("kind") not in ("train", "eval"):
        return None
    needed = {"step", "tokens", "loss", "seconds"}
    if line["kind"] == "eval":
        needed.add("perplexity")
    for name, value in line.items():
        if name in ("step", "tokens"):
            right = type(value) is int
        else:
            right = type(value) in (int, float) or (value is None and name not in needed)
        if name != "kind" and not right:
            return None
    return line if needed <= line.keys() else None


def check_never_saved(log: Path, first_checkpoint: int) -> None:
    """Raise if a run without checkpoints once had one: its log goes on after the first was due.

    A checkpoint that a signal made before that is not missed: the same few steps are done again.
    """
    reached = max((line["step"] for line in read_log(log)), default=0)
    if reached > first_checkpoint:
        raise ConfigError(
            "run",
            str(log.parent),
            f"must hold the checkpoints it had: its log reaches step {reached}, and it wrote a "
            f"checkpoint after step {first_checkpoint}",
            "Put its newest checkpoint-N folder back, or start a new run in another folder.",
        )


def put_back(log: Path, checkpoint: Path | None) -> str | None:
    """Replace a log by the copy in its checkpoint, or empty it where there is none.

    Returns a sentence if the log was damaged or edited since.
    """
    found = log.read_bytes() if log.is_file() else b""
    copy = b"" if checkpoint is None else (checkpoint / LOG).read_bytes()
    if found != copy:
        write_bytes(log, copy)
    if checkpoint is None or found.startswith(copy):
        return None
    return f"{log}: was changed or damaged, and is again as {checkpoint.name} has it."
