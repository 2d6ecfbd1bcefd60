"""Clocks and memory of a device.

On a GPU marks are CUDA events and steps are queued without waiting in between, so that a sample is
what the device takes once the host runs ahead, and the host's time where it does not. On a CPU it
is wall-clock time.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
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


class Timer:
    """The clock of a device: marks, and the time between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def laps(self, marks: Sequence[Any]) -> list[float]:
        """Milliseconds from each mark to the next, after `wait`."""
        if self.on_gpu:
            return [first.elapsed_time(last) for first, last in pairwise(marks)]
        return [1e3 * (last - first) for first, last in pairwise(marks)]


@dataclass(frozen=True)
class Limits:
    """How long to sample: `repeats` times, or until `seconds` are over but `least` times."""

    repeats: int = 20
    seconds: float = 3.0
    least: int = 3

    def count(self, step_seconds: float) -> int:
        wanted = int(self.seconds / max(step_seconds, 1e-9))
        return min(self.repeats, max(self.least, wanted))


Step = Callable[[int], Sequence[Any]]  # number of the step -> its marks


def sample(timer: Timer, step: Step, limits: Limits, warmup: int = WARMUP_STEPS) -> list[list[Any]]:
    """The laps of every step after warm-up, in milliseconds. The last warm-up step is a pilot."""
    started = time.perf_counter()
    for number in range(warmup):
        timer.wait()
        started = time.perf_counter()
        step(number)
    timer.wait()
    count = limits.count(time.perf_counter() - started)
    steps = [step(warmup + number) for number in range(count)]
    timer.wait()
    return [timer.laps(marks) for marks in steps]


def peak_bytes(timer: Timer, action: Callable[[], Any]) -> int | None:
    """Memory an action needs beyond what was allocated before it.

    On a CPU it is the high-water mark of resident memory less what was resident before the action.
    Only Linux has one; elsewhere it is None.
    """
    if not timer.on_gpu:
        if not STATUS.exists():
            action()
            return None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else the action could use freed heap unnoticed
        before = _status_bytes("VmRSS")
        (STATUS.parent / "clear_refs").write_text("5")  # resets the high-water mark
        action()
        return _status_bytes("VmHWM") - before
    timer.wait()
    before = torch.cuda.memory_allocated(timer.device)
    torch.cuda.reset_peak_memory_stats(timer.device)
    action()
    timer.wait()
    return torch.cuda.max_memory_allocated(timer.device) - before


def _status_bytes(key: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def step_of(
    timer: Timer, *actions: Callable[[], Any], before: Callable[[int], Any] = lambda _: None
) -> Step:
    """A step of some actions, each between two marks; `before(number)` is not timed."""

    def step(number: int) -> Sequence[Any]:
        before(number)
        marks = [timer.mark()]
        for action in actions:
            action()
            marks.append(timer.mark())
        return marks

    return step


def in_graphs(
    timer: Timer, *actions: Callable[[], Any], before: Callable[[], Any] = lambda: None
) -> list[Callable[[], Any]]:
    """Actions that follow each other, each replayed from a CUDA graph; `before` is not captured."""
    stream = torch.cuda.Stream(timer.device)  # warm-up must be on a stream of its own
    stream.wait_stream(torch.cuda.current_stream(timer.device))
    with torch.cuda.stream(stream):
        for _ in range(GRAPH_WARMUP_STEPS):
            before()
            for action in actions:
                action()
    torch.cuda.current_stream(timer.device).wait_stream(stream)
    before()
    pool, replays = torch.cuda.graph_pool_handle(), []
    for action in actions:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = action()
        replays.append(partial(_replay, graph, output))
    return replays


def _replay(graph: torch.cuda.CUDAGraph, output: Any) -> Any:
    """The output lives as long as this can be called, because the graph writes to it."""
    graph.replay()
    return output
