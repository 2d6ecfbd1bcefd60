"""Time and peak memory, fairly: own processes, interleaved rounds, every sample kept.

Each contender lives in its own process, built and checked before anything is timed. Round 0 is a
full-size warm-up; after it all contenders of a group take turns, in alternating order, so that a
busy machine hurts them alike. Round i gives everybody the same batch i; fast ones do more steps.

Peak memory of a step is the kernel's high-water mark of resident memory (VmHWM, reset before the
step) less what was resident once parameters, inputs and library workspaces existed. `ru_maxrss`
cannot be reset and would hide a step behind a costlier build; it is the fallback where there is no
/proc. Gradients are dropped before each step, so the dense [E, D] buffers count for everybody.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

import torch

from airmoe.experiments.bench.compare import WrongAnswerError
from benchmarks.checks import Check, check
from benchmarks.contenders import Contender
from benchmarks.inputs import TokenSource
from benchmarks.peer_pytorch import MissingPackageError

SPIN_SETTING, SPIN_COUNT = "GOMP_SPINCOUNT", "20000"
STRIDE = 100  # between the batches of one turn; more than there are rounds
Status = Literal["timed", "wrong", "missing", "failed"]


@dataclass(frozen=True)
class Sample:
    """One step: seconds, and bytes of memory beyond parameters and inputs."""

    forward: float
    backward: float
    cpu: float  # processor seconds of all threads, forward and backward
    peak_bytes: int

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Entry:
    """One line of a comparison. `build` must be picklable."""

    name: str
    build: Callable[[TokenSource], Contender]
    source: TokenSource
    rounds: int
    steps: int = 1  # per round
    refreshes: int = 0  # rounds with one more step, which also rebuilds the caches


@dataclass
class Result:
    """All that was seen of one contender."""

    name: str
    status: Status = "timed"
    reason: str = ""
    check: Check | None = None
    parameter_bytes: int = 0  # also the size of the dense gradient buffers
    gradient_seconds: float = 0.0  # to make and zero such buffers, apart from any step
    warmup: list[Sample] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    with_refresh: list[Sample] = field(default_factory=list)

    def median(self, part: Literal["forward", "backward", "total"]) -> float:
        return median(getattr(sample, part) for sample in self.samples)

    @property
    def peak_bytes(self) -> int:
        return max(sample.peak_bytes for sample in self.samples)

    @property
    def refresh_seconds(self) -> float | None:
        """What rebuilding the caches adds to a forward."""
        if not self.with_refresh or not self.samples:
            return None
        return median(s.forward for s in self.with_refresh) - self.median("forward")

    def as_json(self) -> dict[str, Any]:
        content = asdict(self)
        if self.status == "timed":
            parts = ("forward", "backward", "total")
            content["median"] = {part: self.median(part) for part in parts}
            content["peak_bytes"] = self.peak_bytes
            content["refresh_seconds"] = self.refresh_seconds
        return content


class Bench:
    """A contender with its inputs, in the process that runs it."""

    def __init__(self, entry: Entry, threads: int) -> None:
        torch.set_num_threads(threads)
        self.source = entry.source
        self.contender = entry.build(entry.source)
        self.cotangent = entry.source.cotangent()
        self.found = check(self.contender, entry.source.batch(0), self.cotangent)
        parameters = [p for p in self.contender.module.parameters() if p.requires_grad]
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in parameters)
        self.gradient_seconds = min(_timed_buffers(parameters) for _ in range(2))
        _return_free_memory()
        self.baseline = _resident()

    def sample(self, batch: int, refresh: bool) -> Sample:
        if refresh:
            self.contender.invalidate()
        hidden = self.source.batch(batch).requires_grad_()
        self.contender.module.zero_grad(set_to_none=True)
        _reset_peak()  # no garbage collection here: whoever leaves cycles behind pays for them
        processor = time.process_time()
        started = time.perf_counter()
        output, *losses = self.contender.forward(hidden)
        forwarded = time.perf_counter()
        cotangents = [self.cotangent, *(None for _ in losses)]
        torch.autograd.backward([output, *losses], cotangents)
        finished = time.perf_counter()
        return Sample(
            forward=forwarded - started,
            backward=finished - forwarded,
            cpu=time.process_time() - processor,
            peak_bytes=_peak() - self.baseline,
        )


class Runner(Protocol):
    """A Bench here or in another process."""

    def start(self) -> Result: ...
    def sample(self, batch: int, refresh: bool) -> Sample: ...
    def stop(self) -> None: ...


class LocalRunner:
    """In this process: quick, for tests; memory then includes what others left behind."""

    def __init__(self, entry: Entry, threads: int) -> None:
        self.entry, self.threads = entry, threads

    def start(self) -> Result:
        result = Result(self.entry.name)
        try:
            self.bench = Bench(self.entry, self.threads)
        except WrongAnswerError as error:
            result.status, result.reason = "wrong", str(error)
        except MissingPackageError as error:
            result.status, result.reason = "missing", str(error)
        else:
            result.check = self.bench.found
            result.parameter_bytes = self.bench.parameter_bytes
            result.gradient_seconds = self.bench.gradient_seconds
        return result

    def sample(self, batch: int, refresh: bool) -> Sample:
        return self.bench.sample(batch, refresh)

    def stop(self) -> None:
        self.__dict__.pop("bench", None)


class ProcessRunner:
    """In a process of its own; the parent asks, one contender works at a time."""

    def __init__(self, entry: Entry, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, entry, threads), daemon=True)
        with _short_spins():
            self.process.start()
        theirs.close()

    def start(self) -> Result:
        return self._ask("start")

    def sample(self, batch: int, refresh: bool) -> Sample:
        return self._ask("sample", batch, refresh)

    def stop(self) -> None:
        self.connection.close()
        self.process.join()

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            self.connection.send((method, arguments))
            return self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            code = self.process.exitcode
            hint = " (out of memory?)" if code == -9 else ""
            raise RuntimeError(f"its process ended with exit code {code}{hint}") from error


@contextmanager
def _short_spins() -> Iterator[None]:
    """Let idle OpenMP threads of a child sleep after some microseconds, unless told otherwise.

    On a quiet machine it changes nothing. On a busy one the default, a spin of a millisecond at
    the end of each small operation, can slow a layer of many operations by fifty times.
    """
    told = any(name in os.environ for name in (SPIN_SETTING, "OMP_WAIT_POLICY"))
    if not told:
        os.environ[SPIN_SETTING] = SPIN_COUNT
    try:
        yield
    finally:
        if not told:
            del os.environ[SPIN_SETTING]


def _serve(connection: Connection, entry: Entry, threads: int) -> None:
    runner = LocalRunner(entry, threads)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(runner, method)(*arguments))


def measure(entries: Sequence[Entry], threads: int, *, isolate: bool = True) -> list[Result]:
    """Build, check and time a group of contenders side by side."""
    kind = ProcessRunner if isolate else LocalRunner
    runners: list[Runner] = [kind(entry, threads) for entry in entries]
    turns: list[tuple[Entry, Runner, Result]] = []
    try:
        for entry, runner in zip(entries, runners, strict=True):
            turns.append((entry, runner, _attempt(runner.start, Result(entry.name))))
        for number in range(1 + max((entry.rounds for entry in entries), default=0)):
            for entry, runner, result in turns[:: -1 if number % 2 else 1]:
                if result.status == "timed" and number <= entry.rounds:
                    _attempt(partial(_turn, entry, runner, result, number), result)
    finally:
        for runner in runners:
            runner.stop()
    return [result for _, _, result in turns]


def _turn(entry: Entry, runner: Runner, result: Result, number: int) -> Result:
    """One contender's turn in a round; round 0 warms up."""
    samples = result.samples if number else result.warmup
    samples.extend(runner.sample(number + STRIDE * step, False) for step in range(entry.steps))
    if 0 < number <= entry.refreshes:
        result.with_refresh.append(runner.sample(number, True))
    return result


def _attempt(action: Callable[[], Result], result: Result) -> Result:
    """A contender that dies (out of memory) is reported, the others go on."""
    try:
        return action()
    except RuntimeError as error:
        result.status, result.reason = "failed", str(error)
        return result


def _timed_buffers(parameters: Sequence[torch.Tensor]) -> float:
    started = time.perf_counter()
    buffers = [torch.empty_like(parameter).zero_() for parameter in parameters]
    seconds = time.perf_counter() - started
    del buffers
    return seconds


def _return_free_memory() -> None:
    """Give freed heap back to the system, so that the baseline does not hide a step's memory."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


_STATUS = Path("/proc/self/status")


def _resident() -> int:
    return _status_bytes("VmRSS") if _STATUS.exists() else _peak()


def _reset_peak() -> None:
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {key}")
