"""Runs of a suite as forks: importing torch for each would take most of the tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import BinaryIO

from airmoe.experiments.suites import PlannedRun, child, run
from airmoe.experiments.suites.folder import SuiteFolder


class Fork:
    """What `subprocess.Popen` is to the suite: a process that runs `child.main`."""

    def __init__(
        self,
        while_running: Callable[[int], None],
        suite: SuiteFolder,
        run: PlannedRun,
        output: BinaryIO,
        modules: Sequence[str],
        processes: int,
    ) -> None:
        assert processes == 1
        self._while_running = while_running
        ended, self._kept_open = os.pipe()
        sys.argv = ["child", str(suite.path), run.folder, *modules]
        handles = (ended, output.fileno(), output.fileno())
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._become, args=(handles,))
        self.process.start()
        os.close(ended)

    def _become(self, handles: Sequence[int]) -> None:
        """As a new process would begin."""
        os.setsid()
        os.close(self._kept_open)
        for number, handle in enumerate(handles):
            os.dup2(handle, number)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()
        child.main()

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._kept_open)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def poll(self) -> int | None:
        code, number = self.process.exitcode, self.process.pid
        if code is None and number is not None:
            self._while_running(number)
        return code


def fork_runs(
    when: Callable[[], bool] = lambda: False, then: Callable[[int], None] = lambda _: None
) -> Callable[[], None]:
    """A patch for `airmoe(...)`; when `when` holds, `then` gets the run's process id, once."""
    done: list[int] = []

    def while_running(number: int) -> None:
        if not done and when():
            done.append(number)
            then(number)

    def patch() -> None:
        setattr(run, "start_process", partial(Fork, while_running))  # noqa: B010 (the type differs)
        run.POLL_SECONDS = 0.005

    return patch
