"""Runs a suite: finished runs are skipped, begun ones go on, and a crash stops no other run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from airmoe.config import check_count
from airmoe.errors import ConfigError, say
from airmoe.experiments.suites.folder import SuiteFolder
from airmoe.experiments.suites.plan import Plan, PlannedRun, check_warmup
from airmoe.experiments.suites.progress import Board
from airmoe.files import write_json
from airmoe.training import RunConfig
from airmoe.training.devices import Machine, check_device
from airmoe.training.display import PrepareDisplay
from airmoe.training.loop import StopOnSignal
from airmoe.training.text import blocks_of, prepared_data

OURS = "airmoe: "  # before an error that a run expected
# The line of a traceback that names the error; torchrun's own says only that there was one.
RAISED = re.compile(r"(?!.*ChildFailedError)[\w.]*(Error|Exception|Interrupt)\b")
POLL_SECONDS = 0.05


def run_suite(
    plan: Plan, out: Path, console: Console, modules: Sequence[str] = (), processes: int = 1
) -> int:
    """Run what is left of a plan; the exit code: 1 if a run failed, 128 + n after a signal n.

    Each run is a process of its own, or several of torchrun's. It imports `modules`, so that it
    knows your routers. Ctrl-C and SIGTERM are passed on to the run, and then end the suite.
    """
    check_count("processes", processes)
    if "LOCAL_RANK" in os.environ:
        rule = "starts torchrun for each run by itself"
        raise ConfigError("suite", "torchrun", rule, "Run: airmoe suite ... --processes N")
    suite = SuiteFolder(out)
    with suite.locked():
        begun = suite.read() if suite.file.exists() else None
        plan, chosen = plan.settled(Machine.this(processes), begun)
        suite.check(plan)
        left = [run for run in plan.runs if not suite.is_finished(run.folder)]
        # All runs of a suite have the same text and recipe.
        steps = _known_steps(plan.runs[0].config, console, processes) if left else 0
        # Only now: refused settings must not bind the next attempt.
        suite.write(plan)
        for line in chosen:
            say(console, line)
        board = Board(suite, plan.runs, steps, console)
        failed = False
        with StopOnSignal(enabled=True) as stop:
            for run in plan.runs:
                suite.failure(run.folder).unlink(missing_ok=True)  # of an earlier attempt
                if run not in left:
                    board.finished(run, "done before")
                    continue
                with board.running(run):
                    code, message = _run_one(suite, run, stop, modules, processes)
                if stop.received is not None:
                    board.stopped(run)
                    return 128 + stop.received
                if code:
                    failed = True
                    write_json(suite.failure(run.folder), {"message": message, "code": code})
                    board.failed(run, message)
                else:
                    board.finished(run)
        board.summary()
        return 1 if failed else 0


def _known_steps(config: RunConfig, console: Console, processes: int) -> int:
    """The length of every run; raises before the first starts if this machine could run none."""
    check_device(config, processes)
    with PrepareDisplay(console, config.data.corpus) as display:
        prepared = prepared_data(config.data, display.show)
    train_blocks, _ = blocks_of(config, prepared)
    steps = config.training.total_steps(len(train_blocks) // config.training.batch_size)
    check_warmup(config.training, steps)
    return steps


def _run_one(
    suite: SuiteFolder, run: PlannedRun, stop: StopOnSignal, modules: Sequence[str], processes: int
) -> tuple[int, str]:
    """The exit code of a run, and why it failed."""
    printed, passed_on = suite.printed(run.folder), False
    with printed.open("ab") as output:
        start = output.tell()
        with start_process(suite, run, output, modules, processes) as process:
            while (code := process.poll()) is None:
                if stop.received is not None and not passed_on:
                    process.send_signal(stop.received)
                    passed_on = True
                time.sleep(POLL_SECONDS)
    return code, _last_words(printed.read_bytes()[start:], code) if code else ""


def start_process(
    suite: SuiteFolder, run: PlannedRun, output: BinaryIO, modules: Sequence[str], processes: int
) -> subprocess.Popen[bytes]:
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", *(torchrun if processes > 1 else ())),
            *("airmoe.experiments.suites.child", str(suite.path), run.folder, *modules),
        ],
        stdin=subprocess.PIPE,  # never written to: it ends with this process, and the run with it
        stdout=output,
        stderr=subprocess.STDOUT,
        # A file of the working folder must not pass for a module of ours.
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        # Ctrl-C reaches the foreground group; a run must hear it once, from us.
        start_new_session=True,
    )


def _last_words(printed: bytes, code: int) -> str:
    """Why a process ended, in one line: what it said last, or the signal that killed it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    said = [line.strip() for line in printed.decode(errors="replace").splitlines()]
    ours = [line.removeprefix(OURS) for line in said if line.startswith(OURS)]
    # Some errors have many lines, and name themselves in the first.
    raised = [line for line in said if RAISED.match(line)]
    last = (ours or raised or list(filter(None, said)))[-1:]
    return last[0] if last else f"ended with code {code}"
