"""Ctrl-C and a polite kill: the step is finished and saved, and the run goes on exactly."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from airmoe.training import evaluation, loop
from airmoe.training.checkpoints import checkpoints, step_of
from airmoe.training.loop import TrainingLoop
from tests.training import kills
from tests.training.command import airmoe, airmoe_train, started
from tests.training.runs import (
    Whole,
    assert_same_run,
    assignments,
    in_process,
    resumed,
    small_run,
    train_here,
)

INTERRUPTED, TERMINATED = 130, 143


def send(
    number: int,
    owner: Any,
    name: str,
    now: Callable[..., bool],
    times: int = 1,
    pause: float = 0.01,
) -> Callable[[], None]:
    """Signal this process at a call of `owner.name`."""

    def job(*_: Any, **__: Any) -> None:
        for _again in range(times):
            os.kill(os.getpid(), number)
            time.sleep(pause)

    return lambda: kills.before(owner, name, now, job)


def before_step(number: int, step: int) -> Callable[[], None]:
    return send(number, TrainingLoop, "_take_step", kills.is_step(step))


def in_micro_batch(number: int, times: int = 1) -> Callable[[], None]:
    return send(signal.SIGTERM, TrainingLoop, "_forward_backward", kills.nth(number), times)


# Name -> patch, exit code, and the step that is finished.
MOMENTS = {
    "terminated": (before_step(signal.SIGTERM, 6), TERMINATED, 6),
    "inside a window": (in_micro_batch(2 * 4 + 2), TERMINATED, 5),
    "inside an evaluation": (
        *(send(signal.SIGTERM, evaluation, "_summed_loss", kills.nth(2)), TERMINATED, 4),
    ),
    "twice at once, as by timeout": (in_micro_batch(3, times=2), TERMINATED, 2),
    "interrupted": (before_step(signal.SIGINT, 6), INTERRUPTED, 6),
    "in the first step": (before_step(signal.SIGINT, 1), INTERRUPTED, 1),
    "at an evaluation": (before_step(signal.SIGINT, 4), INTERRUPTED, 4),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_step_is_finished_and_saved(moment: str, plain: Whole, run: Path) -> None:
    patch, code, step = MOMENTS[moment]
    outcome = airmoe_train(plain.config, run, patch=patch)
    assert outcome.code == code
    assert outcome.out.splitlines()[-1] == (
        f"Stopped after step {step}. Go on: airmoe train --resume {run}"
    )
    assert outcome.err == ""
    assert step_of(checkpoints(run)[-1]) == step
    assert not (run / "result.json").exists()
    assert airmoe("train", "--resume", run).code == 0
    assert_same_run(run, plain.path)


@pytest.mark.parametrize("step", [4, 5, 6])  # lists are built in 1, 4, 7 and 10
def test_lists_that_live_several_steps(step: int, lasting: Whole, run: Path) -> None:
    patch = before_step(signal.SIGTERM, step)
    assert airmoe_train(lasting.config, run, patch=patch).code == TERMINATED
    last = checkpoints(run)[-1]
    saved = load_file(last / "model.safetensors")
    (age,) = (tensor for name, tensor in saved.items() if name.endswith("lists.age"))
    assert (step_of(last), int(age)) == (step, step - 3)
    assert_same_run(resumed(run), lasting.path)


def test_a_signal_in_the_last_step_comes_too_late(plain: Whole, run: Path) -> None:
    patch = before_step(signal.SIGTERM, 12)
    outcome = airmoe_train(plain.config, run, patch=patch)
    assert outcome.code == 0 and "Finished" in outcome.out
    assert_same_run(run, plain.path)


def test_the_second_signal_does_not_wait(plain: Whole, tmp_path: Path) -> None:
    for number, code in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, -signal.SIGTERM)):
        run = tmp_path / f"run-{number}"
        pause = 1.2 * loop.ECHO_SECONDS
        patch = send(number, TrainingLoop, "_forward_backward", kills.nth(3), times=2, pause=pause)
        outcome = airmoe_train(plain.config, run, patch=patch)
        assert outcome.code == code
        assert checkpoints(run) == []
        assert outcome.err in ("", "airmoe: interrupted\n")


def test_signals_are_given_back(text: Path, run: Path) -> None:
    config = small_run(text, steps=1, eval_every=1)

    def job() -> None:
        def mine(*_: Any) -> None: ...

        signal.signal(signal.SIGTERM, mine)
        train_here(config, run)
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert in_process(job) == 0


@pytest.mark.slow
def test_a_real_process_killed_at_a_random_moment(plain: Whole, run: Path) -> None:
    """`python -m airmoe`, killed by somebody else at no particular line."""
    process = started("train", "tiny", *assignments(plain.config), "--run", run)
    until = time.monotonic() + 120
    while not (run / "log.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(random.uniform(0.0, 0.1))  # the whole run takes little more than half a second
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = started("train", "--resume", run)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == f"Finished: {run / 'result.json'}"
    assert_same_run(run, plain.path)
