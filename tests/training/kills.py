"""Moments at which something happens to a run, first of all a kill.

Each patches the code it names, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from airmoe.training import checkpoints
from airmoe.training.loop import TrainingLoop
from tests.training.runs import in_process, kill_self

Kill = Callable[[], None]
FILE_EVENTS = (
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"),
)


def _die(*_: Any, **__: Any) -> None:
    kill_self()


def before(
    owner: Any, name: str, now: Callable[..., bool], job: Callable[..., object] = _die
) -> None:
    """Do `job`, with the same arguments, before every call of `owner.name` where `now` is true."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        if now(*arguments, **named):
            job(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, replaced)


def after(owner: Any, name: str, now: Callable[..., bool]) -> None:
    """Kill this process right behind the first such call."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if now(*arguments, **named):
            kill_self()
        return result

    setattr(owner, name, replaced)


def nth(count: int) -> Callable[..., bool]:
    """True at the call of that number, counted from 1."""
    calls = 0

    def now(*_: Any, **__: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls == count

    return now


def since(count: int) -> Callable[..., bool]:
    """True from the call of that number on."""
    now, calls = nth(count), [False]

    def reached(*_: Any, **__: Any) -> bool:
        calls[0] = calls[0] or now()
        return calls[0]

    return reached


def is_step(step: int) -> Callable[..., bool]:
    """True in the loop's methods while it takes that step, counted from 1."""
    return lambda loop, *_, **__: loop.step == step - 1


def before_call(owner: Any, name: str, count: int) -> Kill:
    """Before the call of that number, counted over the whole process."""
    return lambda: before(owner, name, nth(count))


def after_call(owner: Any, name: str, count: int) -> Kill:
    return lambda: after(owner, name, nth(count))


def before_step(step: int) -> Kill:
    """Between two accumulation windows."""
    return lambda: before(TrainingLoop, "_take_step", is_step(step))


def copied(run: Path, step: int, to: Path) -> Callable[[], None]:
    """What a kill before that step would leave, beside the run, which goes on."""
    job = partial(shutil.copytree, run, to)
    return lambda: before(TrainingLoop, "_take_step", is_step(step), lambda *_, **__: job())


def at_micro_batch(count: int) -> Kill:
    return after_call(TrainingLoop, "_forward_backward", count)


def in_fill(file: int) -> Kill:
    """While a checkpoint is written: its model is there, tensor file number `file` is not."""
    return before_call(checkpoints, "save_tensors", file)


def on_file_operation(folder: Path, then: Callable[[], object]) -> None:
    """From now on call `then` before every operation on a file in `folder`, in this process."""
    process = os.getpid()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        ours = event in FILE_EVENTS and str(arguments[0]).startswith(str(folder))
        if ours and os.getpid() == process:
            then()

    sys.addaudithook(watch)


def killed_at_operation(job: Callable[[], Any], folder: Path, number: int) -> int:
    """How `job` ends in a process that dies before that operation on a file in `folder`."""

    def dying() -> None:
        now = nth(number)
        on_file_operation(folder, lambda: now() and kill_self())
        job()

    return in_process(dying)


def in_rotation() -> None:
    """Half of an old checkpoint's files are gone."""

    def half_removed(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors and path.exists():
            for file in sorted(path.iterdir())[::2]:
                file.unlink()
            kill_self()
        original(path, ignore_errors=ignore_errors)

    original = shutil.rmtree
    setattr(shutil, "rmtree", half_removed)  # noqa: B010 (the type differs)
