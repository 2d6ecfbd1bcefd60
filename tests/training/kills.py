"""Moments at which something happens to a run, first of all a kill.

Each patches the code it names, in a process of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airmoe.training import checkpoints, evaluation
from airmoe.training.loop import TrainingLoop
from airmoe.training.run_log import LogWriter
from tests.training.runs import kill_self

Kill = Callable[[], None]


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


def before_step(step: int) -> Kill:
    """Between two accumulation windows."""
    return lambda: before(TrainingLoop, "_take_step", is_step(step))


def at_micro_batch(count: int) -> Kill:
    """Right behind a micro-batch, counted over the whole process."""
    return lambda: after(TrainingLoop, "_forward_backward", nth(count))


def after_optimizer_step(count: int) -> Kill:
    """The parameters have moved, the step is not counted yet."""
    return lambda: after(TrainingLoop, "_take_step", nth(count))


def in_evaluation(batch: int) -> Kill:
    return lambda: before(evaluation, "_summed_loss", nth(batch))


def after_log_line(count: int) -> Kill:
    return lambda: after(LogWriter, "write", nth(count))


def in_fill(file: int) -> Kill:
    """While a checkpoint is written: its model is there, tensor file number `file` is not."""
    return lambda: before(checkpoints, "save_tensors", nth(file))


def before_rename(count: int) -> Kill:
    """All files of a checkpoint are there, its name is not."""
    return lambda: after(checkpoints, "sync_tree", nth(count))


def before_rotation(count: int) -> Kill:
    """A new checkpoint is whole, the old ones are still there."""
    return lambda: before(checkpoints, "remove_old", nth(count))


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


def after_rotation(count: int) -> Kill:
    return lambda: after(checkpoints, "remove_old", nth(count))


def before_result() -> None:
    """Everything is done but the summary."""
    from airmoe.training import run

    before(run, "write_result", nth(1))
