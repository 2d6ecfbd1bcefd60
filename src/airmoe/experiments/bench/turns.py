"""Contenders side by side on a CPU, in turns: a busy machine hurts them alike.

Each lives in a process of its own, built and checked before anything is timed; one works at a time.
After a warm-up step of full size they take turns, in alternating order, and slow ones take fewer.

Peak memory of a step is the kernel's high-water mark of resident memory (VmHWM, reset before the
step) less what was resident once parameters, inputs and library workspaces existed. `ru_maxrss`
cannot be reset and would hide a step behind a costlier build; it is the fallback where there is no
/proc. Gradients are dropped after each step, so the dense [E, D] buffers count for everybody.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from airmoe.experiments.bench.cases import Shape
from airmoe.experiments.bench.contenders import Contender
from airmoe.experiments.bench.entries import ENTRIES, backend
from airmoe.experiments.bench.inputs import make_inputs
from airmoe.experiments.bench.measure import (
    Result,
    Setting,
    build_and_check,
    guarded,
    time_apart,
    training_step,
)
from airmoe.experiments.bench.timing import Ceilings, Limits, Step, Timer

SPIN_SETTING, SPIN_COUNT = "GOMP_SPINCOUNT", "20000"
LIMITS = Limits(seconds=10.0, least=3, most_seconds=40.0)
STATUS = Path("/proc/self/status")
Ask = Callable[..., Any]  # name of a method and its arguments -> what it returns


class Subject:
    """A contender, in the process that runs it."""

    contender: Contender
    step: Step
    resident: int  # bytes before any step

    def __init__(
        self, key: str, shape: Shape, seed: int, ceilings: Ceilings, limits: Limits
    ) -> None:
        device = torch.device("cpu")
        inputs = make_inputs(shape, device, seed)
        self.setting = Setting(inputs, "training", Timer(device), ceilings, limits)
        self.entry = ENTRIES[key]
        self.result = Result(key, self.entry.name, self.entry.role)

    def prepare(self) -> int:
        """Build, check and warm up; how many turns it should get."""
        self._attempt(self._prepare)
        if self.result.status != "timed":
            return 0
        return self.setting.limits.count(sum(self._run(0)) / 1e3)

    def turn(self, number: int) -> None:
        """One step that counts."""
        self.result.add([self._run(number)])
        used = _status_bytes("VmHWM") - self.resident
        self.result.peak_bytes = max(self.result.peak_bytes or 0, used)

    def finish(self) -> Result:
        if self.result.status == "timed":
            self._attempt(lambda: time_apart(self.contender, self.setting, self.result))
        return self.result

    def _attempt(self, action: Callable[[], None]) -> None:
        def attempt() -> None:
            with backend(self.entry, self.setting.inputs) as self.result.backend:
                action()

        guarded(self.result, attempt)

    def _prepare(self) -> None:
        contender = build_and_check(self.entry, self.setting, self.result)
        if contender is not None:
            self.contender = contender
            self.step = training_step(contender, self.setting, parts=1)
            _return_free_memory()
            self.resident = _status_bytes("VmRSS")

    def _run(self, number: int) -> list[float]:
        """Milliseconds of forward and backward."""
        if STATUS.exists():  # no garbage collection here: who leaves cycles behind pays for them
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        with backend(self.entry, self.setting.inputs):
            return self.setting.timer.laps(self.step(number))


def measure_in_turns(
    keys: Sequence[str], shape: Shape, seed: int, ceilings: Ceilings, limits: Limits
) -> list[Result]:
    """Build, check and time contenders side by side."""
    given = (shape, seed, ceilings, limits)
    results = {key: Result(key, ENTRIES[key].name, ENTRIES[key].role) for key in keys}
    with ExitStack() as stack:
        subjects = {key: stack.enter_context(own_process(Subject, key, *given)) for key in keys}

        def ask(key: str, method: str, *arguments: Any) -> Any:
            """None from a contender whose process ended: that is its result."""
            found = []
            if results[key].status == "timed":
                guarded(results[key], lambda: found.append(subjects[key](method, *arguments)))
            return found[0] if found else None

        turns = {key: ask(key, "prepare") or 0 for key in keys}
        for number in range(1, 1 + max(turns.values())):
            for key in keys[:: -1 if number % 2 else 1]:
                if number <= turns[key]:
                    ask(key, "turn", number)
        return [ask(key, "finish") or results[key] for key in keys]


@contextmanager
def own_process(make: Callable[..., Any], *arguments: Any) -> Iterator[Ask]:
    """An object in a process of its own, whose methods are called by name."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
    with _short_spins():
        process.start()
    theirs.close()

    def ask(method: str, *arguments: Any) -> Any:
        try:
            connection.send((method, arguments))
            return connection.recv()
        except (EOFError, OSError) as error:
            process.join()
            hint = " (out of memory?)" if process.exitcode == -9 else ""
            rule = f"its process ended with exit code {process.exitcode}{hint}"
            raise RuntimeError(rule) from error

    try:
        yield ask
    finally:
        connection.close()
        process.join()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = make(*arguments)
    with suppress(EOFError):
        while True:
            method, given = connection.recv()
            connection.send(getattr(served, method)(*given))


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


def _return_free_memory() -> None:
    """Give freed heap back to the system, or it would hide a part of the next steps' memory."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _status_bytes(key: str) -> int:
    """VmRSS, what is resident, or VmHWM, the most there was."""
    if not STATUS.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
