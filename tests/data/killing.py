"""Prepares a corpus again and again, killed with SIGKILL before one file operation after another.

Run by test_resume.py as a process of its own: it must fork, which needs a process with no threads.
Arguments: the corpus, an empty folder. Prints "<number of kills> identical" or fails.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from airmoe.data import PrepareConfig, prepare
from airmoe.data.shards import SplitWriter
from tests.data.common import folder_bytes

SHARD_TOKENS = 700
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate")


def kill_before(moment: int, folder: Path) -> None:
    """Die just before the given operation on a file in `folder` or document written."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and str(arguments[0]).startswith(str(folder)):
            step()

    plain_add = SplitWriter.add

    def add(self: SplitWriter, tokens: Any) -> bool:
        step()
        return plain_add(self, tokens)

    sys.addaudithook(watch)
    SplitWriter.add = add  # type: ignore[method-assign]


def run(corpus: str, out: Path, moment: int | None) -> bool:
    """Prepare in a forked child; True if it came to its end."""
    child = os.fork()
    if child == 0:
        if moment is not None:
            kill_before(moment, out.parent)
        config = PrepareConfig(
            corpus=corpus, tokenizer="bpe:300", out=str(out), validation_fraction=0.2
        )
        prepare(config, _shard_tokens=SHARD_TOKENS)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"moment {moment}: exit status {status}"
    return status == 0


def main(corpus: str, folder: Path) -> None:
    os.fsync = lambda _: None  # type: ignore[assignment]  # the kernel survives SIGKILL
    assert run(corpus, folder / "whole" / "out", None)
    whole = folder_bytes(folder / "whole")
    place, kills, last = folder / "killed", 0, False
    moment = 1
    while not last:
        last = run(corpus, place / "out", moment)
        shown = {name: file for name, file in folder_bytes(place).items() if name != "out/lock"}
        assert (place / "out").exists() <= (shown == whole), "half a folder shows"
        run(corpus, place / "out", 12)  # the second try dies too, a little further on
        assert run(corpus, place / "out", None)
        assert folder_bytes(place) == whole, f"killed at moment {moment}"
        shutil.rmtree(place)
        kills += not last
        moment += 1 if moment < 12 else 4  # the beginning in full, then a sample
    print(f"{kills} identical")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
