"""Runs of a suite as forks: importing torch for each would take most of the tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import BinaryIO

from airmoe.experiments.suites import PlannedRun, child, run
from airmoe.experiments.suites.folder import SuiteFolder


class Fork:
    """What `subprocess.Popen` is to the suite: a process that runs `child.main`."""

    def __init__(
        self,
        suite: SuiteFolder,
        run: PlannedRun,
        output: BinaryIO,
        modules: Sequence[str],
        processes: int,
    ) -> None:
        assert processes == 1
        self._ended, self._kept_open = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become([str(suite.path), run.folder, *modules], output)
        os.close(self._ended)

    def _become(self, arguments: list[str], output: BinaryIO) -> None:
        """As a new process would begin."""
        code = 1
        try:
            os.setsid()
            os.close(self._kept_open)
            for number, handle in enumerate((self._ended, output.fileno(), output.fileno())):
                os.dup2(handle, number)
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.freeze()
            sys.argv = ["child", *arguments]
            child.main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._kept_open)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        self.while_running()
        return None

    def while_running(self) -> None: ...


def fork_runs(
    when: Callable[[], bool] = lambda: False, then: Callable[[int], None] = lambda _: None
) -> Callable[[], None]:
    """A patch for `airmoe(...)`; when `when` holds, `then` gets the run's process id, once."""

    class Watched(Fork):
        done = False

        def while_running(self) -> None:
            if not Watched.done and when():
                Watched.done = True
                then(self.pid)

    def patch() -> None:
        setattr(run, "start_process", Watched)  # noqa: B010 (the type differs)
        run.POLL_SECONDS = 0.005

    return patch
