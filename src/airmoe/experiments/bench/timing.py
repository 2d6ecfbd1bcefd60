"""Clocks and memory of a device.

On a GPU marks are CUDA events and steps are queued without waiting in between, so that a sample is
what the device takes once the host runs ahead, and the host's time where it does not. On a CPU it
is wall-clock time.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

WARMUP_STEPS = 2
GRAPH_WARMUP_STEPS = 3
STATUS = Path("/proc/self/status")


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Limits:
    """How long to sample: `repeats` times, or until `seconds` are over but `least` times."""

    repeats: int = 20
    seconds: float = 3.0
    least: int = 3

    def count(self, step_seconds: float) -> int:
        wanted = int(self.seconds / max(step_seconds, 1e-9))
        return min(self.repeats, max(self.least, wanted))


@dataclass(frozen=True)
class Step:
    """Actions that follow each other, each timed; `load(number)`, which comes first, is not."""

    device: torch.device
    actions: list[Callable[[], Any]]
    load: Callable[[int], Any] = lambda _: None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def take(self, number: int) -> list[Any]:
        """Take the step; -> marks before the first action and after each."""
        self.load(number)
        marks = [self._mark()]
        for action in self.actions:
            action()
            marks.append(self._mark())
        return marks

    def sample(self, limits: Limits, warmup: int = WARMUP_STEPS) -> list[list[float]]:
        """Milliseconds of each action in each step. The last warm-up step tells how many fit in."""
        started = time.perf_counter()
        for number in range(warmup):
            self._wait()
            started = time.perf_counter()
            self.take(number)
        self._wait()
        count = limits.count(time.perf_counter() - started)
        steps = [self.take(warmup + number) for number in range(count)]
        self._wait()
        return [[self._between(*pair) for pair in pairwise(marks)] for marks in steps]

    def totals(self, limits: Limits) -> list[float]:
        """Milliseconds of every step."""
        return [sum(laps) for laps in self.sample(limits)]

    def peak_bytes(self) -> int | None:
        """Memory the step needs beyond what was allocated before it.

        On a CPU it is the high-water mark of resident memory less what was resident before. Only
        Linux has one; elsewhere it is None.
        """
        self.load(0)  # what the last step left is gone
        if not self.on_gpu:
            if not STATUS.exists():
                self.take(0)
                return None
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # else the step could use freed heap unnoticed
            before = _status_bytes("VmRSS")
            (STATUS.parent / "clear_refs").write_text("5")  # resets the high-water mark
            self.take(0)
            return _status_bytes("VmHWM") - before
        self._wait()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.take(0)
        self._wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    def captured(self) -> Step:
        """The same with each action replayed from a CUDA graph."""
        stream = torch.cuda.Stream(self.device)  # warm-up must be on a stream of its own
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(GRAPH_WARMUP_STEPS):
                self.load(0)
                for action in self.actions:
                    action()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.load(0)
        pool, replays = torch.cuda.graph_pool_handle(), []
        for action in self.actions:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = action()
            replays.append(partial(_replay, graph, output))
        return Step(self.device, replays, self.load)

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def _between(self, first: Any, last: Any) -> float:
        """Milliseconds from a mark to the next, after `_wait`."""
        return first.elapsed_time(last) if self.on_gpu else 1e3 * (last - first)


def _status_bytes(key: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _replay(graph: torch.cuda.CUDAGraph, output: Any) -> Any:
    """The output lives as long as this can be called, because the graph writes to it."""
    graph.replay()
    return output
