"""Kills at random moments: a job is killed, begun again, and must end with the same bits.

Half of the kills come at a random operation on a file, the others after a random time. How many
there are is AIRMOE_KILLS, by default few: `AIRMOE_KILLS=100 pytest tests/test_random_kills.py`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training.runs import in_process

KILLS = int(os.environ.get("AIRMOE_KILLS", "8"))
FILE_EVENTS = (
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"),
)
Job = Callable[[], Any]


def on_file_operation(folder: Path, then: Callable[[], None]) -> None:
    """From now on call `then` before every operation on a file in `folder`, in this process."""
    process = os.getpid()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        ours = event in FILE_EVENTS and str(arguments[0]).startswith(str(folder))
        if ours and os.getpid() == process:
            then()

    sys.addaudithook(watch)


def measured(job: Job, folder: Path) -> tuple[int, float]:
    """How many such operations `job` does until its end, and how long it takes."""
    counter = folder.with_name(f"{folder.name}.operations")

    def counted() -> None:
        operations = 0

        def count() -> None:
            nonlocal operations
            operations += 1

        on_file_operation(folder, count)
        job()
        counter.write_text(str(operations))

    start = time.monotonic()
    assert in_process(counted) == 0
    seconds = time.monotonic() - start
    operations = int(counter.read_text())
    counter.unlink()
    return operations, seconds


def killed_at_operation(job: Job, folder: Path, number: int) -> int:
    """`job` in a process that dies before that operation."""

    def dying() -> None:
        left = number

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        on_file_operation(folder, count)
        job()

    return in_process(dying)


def killed_after(job: Job, seconds: float) -> int:

    def dying() -> None:
        timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        job()

    return in_process(dying)


def kill_at_random(job: Job, folder: Path, check: Job, kills: int, seed: int) -> int:
    """Begin `job` again after every kill until it ends by itself, `check` what it left, repeat.

    `job` must remove nothing that an earlier one made, except to begin anew when it had come to
    its end: `check` does that. Gives how many processes were killed.
    """
    draw = random.Random(seed)
    operations, seconds = measured(job, folder)
    check()
    killed, in_a_row = 0, 0
    while killed < kills:
        if draw.random() < 0.5:
            code = killed_at_operation(job, folder, draw.randint(1, operations))
        else:
            code = killed_after(job, draw.uniform(0, seconds))
        assert code in (0, -signal.SIGKILL), code
        killed += code != 0
        in_a_row = in_a_row + 1 if code else 0
        if in_a_row == 3:  # now to the end, or it would begin again and again
            assert in_process(job) == 0
            code = 0
        if code == 0:
            check()
            in_a_row = 0
    assert in_process(job) == 0
    check()
    return killed
