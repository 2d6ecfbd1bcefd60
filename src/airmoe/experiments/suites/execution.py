"""How a run of a suite is run: in a process of its own, or in torchrun's processes."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch
from rich.console import Console

from airmoe.distributed import on_first_rank, rank
from airmoe.errors import ConfigError, RunError, visible
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.plan import PlannedRun
from airmoe.training import Finished, RunConfig, resume, train

RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")  # the line of a traceback that counts


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int = 0  # as of a process
    message: str = ""  # one line, of one that failed
    stopped_by: int | None = None  # a signal for the whole suite


def train_or_resume(path: Path, config: RunConfig, console: Console, *, begun: bool) -> Finished:
    """Go on with a run, or start it."""
    return resume(path, console) if begun else train(config, path, console)


class OwnProcesses:
    """One process per run. Ctrl-C and SIGTERM are passed on to it, and then end the suite."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._process: subprocess.Popen[bytes] | None = None
        self._received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> OwnProcesses:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = number
        if self._process is not None:
            self._process.send_signal(number)

    def __call__(self, suite: SuiteFolder, run: PlannedRun) -> Outcome:
        if self._received is not None:
            return Outcome(stopped_by=self._received)
        printed = suite.printed(run.folder)
        with printed.open("ab") as output:
            start = output.tell()
            with start_process(suite, run, output, self._modules) as self._process:
                if self._received is not None:  # it came while the process was being made
                    self._process.send_signal(self._received)
                code = self._process.wait()
            self._process = None
        if self._received is not None:
            return Outcome(stopped_by=self._received)
        return Outcome(code, _last_words(printed, start, code) if code else "")


def start_process(
    suite: SuiteFolder, run: PlannedRun, output: BinaryIO, modules: Sequence[str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            # -P: a file of the working folder must not pass for a module of ours.
            *(sys.executable, "-P", "-m", "airmoe.experiments.suites.child"),
            *(str(suite.path), run.folder, *modules),
        ],
        stdin=subprocess.PIPE,  # never written to: its end tells the run of ours
        stdout=output,
        stderr=subprocess.STDOUT,
        # Ctrl-C reaches the foreground group; a run must hear it once, from us.
        start_new_session=True,
    )


def _last_words(printed: Path, start: int, code: int) -> str:
    """Why a process ended, in one line: the last it printed, or the signal that killed it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    with printed.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    # Some errors have many lines, and name themselves in the first.
    named = [line for line in said if RAISED.match(line)]
    last = (named or said)[-1:]
    return last[0].removeprefix("airmoe: ") if last else f"ended with code {code}"


def in_this_group(suite: SuiteFolder, run: PlannedRun) -> Outcome:
    """Run in torchrun's processes.

    A failure that every process has (`ConfigError`, `RunError`) is the run's; one that a single
    process has would leave the others waiting, so it ends them all.
    """
    begun = on_first_rank(lambda: suite.state(run.folder) != "new")
    output = suite.printed(run.folder) if rank() == 0 else Path(os.devnull)
    with output.open("a", encoding="utf-8") as file:
        try:
            console = Console(file=file)
            finished = train_or_resume(suite.run(run.folder), run.config, console, begun=begun)
        except (ConfigError, RunError) as error:
            print(visible(error), file=file)
            return Outcome(2 if isinstance(error, ConfigError) else 1, str(error))
        finally:
            _free_memory()
    return Outcome(stopped_by=finished.stopped_by)


def _free_memory() -> None:
    """What a run leaves in this process must not count as the next one's."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
