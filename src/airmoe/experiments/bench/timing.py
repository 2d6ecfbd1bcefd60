"""Clocks, memory, and the ceilings of a device.

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
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from airmoe.experiments.bench.contenders import Contender

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
    """How long to sample: `repeats` times, or until `seconds` are over but `least` times.

    Steps so slow that `least` of them take more than `most_seconds` get fewer samples.
    """

    repeats: int = 20
    seconds: float = 3.0
    least: int = 5
    most_seconds: float = 12.0

    def count(self, step_seconds: float) -> int:
        step_seconds = max(step_seconds, 1e-9)
        wanted = min(self.repeats, max(self.least, int(self.seconds / step_seconds)))
        return max(1, min(wanted, int(self.most_seconds / step_seconds)))


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


def step_in_graphs(timer: Timer, contender: Contender) -> Step:
    """A step that replays forward and backward from one CUDA graph each."""
    batches, cotangent = contender.inputs.batches, contender.inputs.cotangent
    static = batches[0].clone().requires_grad_()
    _warm_up(timer, lambda: contender.backward(contender.forward(static), cotangent))
    contender.module.zero_grad(set_to_none=True)  # gradients must get the graph's own memory
    static.grad = None
    forwards, backwards = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forwards):
        output = contender.forward(static)
    with torch.cuda.graph(backwards, pool=forwards.pool()):
        contender.backward(output, cotangent)

    def copy(number: int) -> None:
        static.detach().copy_(batches[number % len(batches)])

    return step_of(timer, forwards.replay, backwards.replay, before=copy)


def action_in_graph(timer: Timer, action: Callable[[], Any]) -> Callable[[], Any]:
    """An action without input, replayed from a CUDA graph."""
    _warm_up(timer, action)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = action()

    def replay() -> Any:
        graph.replay()
        return output  # the graph writes to it: it must live

    return replay


def _warm_up(timer: Timer, action: Callable[[], Any]) -> None:
    """Run it a few times on a stream of its own, as capture requires."""
    stream = torch.cuda.Stream(timer.device)
    stream.wait_stream(torch.cuda.current_stream(timer.device))
    with torch.cuda.stream(stream):
        for _ in range(GRAPH_WARMUP_STEPS):
            action()
    torch.cuda.current_stream(timer.device).wait_stream(stream)


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches on a matrix product and on a copy."""

    dtype: str
    flops: float  # per second, of one large square product
    bytes: float  # per second, read and written, of one large copy


@cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """8192 x 8192 x 8192 and a copy of 2 GiB; toy sizes on a CPU."""
    timer = Timer(device)
    size, length = (8192, 2**31) if timer.on_gpu else (256, 2**24)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    source = torch.zeros(length, device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    limits = Limits(seconds=0.5)

    def seconds(action: Callable[[], Any]) -> float:
        return median(lap for (lap,) in sample(timer, step_of(timer, action), limits)) / 1e3

    return Ceilings(
        dtype=str(dtype).removeprefix("torch."),
        flops=2 * size**3 / seconds(lambda: torch.mm(left, right, out=product)),
        bytes=2 * length / seconds(lambda: target.copy_(source)),
    )
