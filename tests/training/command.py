"""The command line in a process of its own, with what it printed and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from airmoe import cli
from airmoe.training import RunConfig
from tests.training.runs import assignments, in_process

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def airmoe(
    *arguments: object, cwd: Path | None = None, patch: Callable[[], Any] | None = None
) -> Outcome:
    """`airmoe ARGUMENTS` in a forked process: imports nothing again, and forgets its `patch`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:

        def job() -> None:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            # pytest replaced these; line by line, so that a killed process keeps its lines.
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            torch.set_num_threads(1)
            print_warnings()
            if cwd is not None:
                os.chdir(cwd)
            sys.argv = ["airmoe", *map(str, arguments)]
            if patch is not None:
                patch()
            try:
                cli.main()
            except SystemExit as stop:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(stop.code if isinstance(stop.code, int) else 0)

        code = in_process(job)
        out.seek(0)
        err.seek(0)
        return Outcome(code, out.read(), err.read())


def succeeds(*arguments: object, **options: Any) -> str:
    """What `airmoe ARGUMENTS` prints; it must end well, with nothing on standard error."""
    outcome = airmoe(*arguments, **options)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    return outcome.out


def airmoe_train(config: RunConfig, run: Path, *overrides: str, **options: Any) -> Outcome:
    """`airmoe train` with these settings."""
    return airmoe("train", "tiny", *assignments(config), *overrides, "--run", run, **options)


def table_rows(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if "│" in line]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def print_warnings() -> None:
    """As Python does by itself: pytest collects them, and a user would see them."""

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = show


def started(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """`python -m airmoe ARGUMENTS`, the real thing."""
    environment = os.environ | {"PYTHONPATH": pythonpath(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "airmoe", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def pythonpath() -> str:
    """`src` and the root, then what the tests themselves were given."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), *([given] if given else [])])


def assert_one_line(outcome: Outcome, code: int, *parts: str) -> None:
    """The error a user sees: one line that says the `parts`, and that exit code."""
    assert outcome.code == code, outcome
    assert outcome.err.startswith("airmoe: ") and outcome.err.endswith("\n"), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    for part in parts:
        assert part in outcome.err, (part, outcome.err)
