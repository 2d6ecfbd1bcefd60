"""A run that must stop on its way: one line, exit code 1, and the checkpoint before is kept."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from airmoe.training import checkpoints, loop
from airmoe.training.checkpoints import step_of
from airmoe.training.loop import TrainingLoop
from tests.training import kills
from tests.training.command import airmoe, airmoe_train, assert_one_line
from tests.training.runs import assert_same_run, small_run, tensors_of, timeless_log, trained


def is_full(*arguments: Any, code: int = errno.ENOSPC) -> None:
    """What a full disk does to a write: half of it is there."""
    if isinstance(arguments[-1], Path):
        arguments[-1].write_bytes(b"half")
    raise OSError(code, os.strerror(code))


def full_disk(number: int) -> Callable[[], None]:
    """From the tensor file of that number on."""
    return lambda: kills.before(checkpoints, "save_tensors", kills.since(number), is_full)


def test_a_full_disk_keeps_the_checkpoint_before(text: Path, run: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=6, eval_every=2)
    outcome = airmoe_train(config, run, patch=full_disk(3 + 1))
    kept = f"{run}/checkpoint-2 is whole"
    assert_one_line(outcome, 1, "step 4", "disk is full", kept, f"--resume {run}")
    outcome = airmoe("train", "--resume", run, patch=full_disk(1))
    assert_one_line(outcome, 1, "step 4", "disk is full")
    assert airmoe("train", "--resume", run).code == 0
    assert_same_run(run, trained(config, tmp_path / "reference"))


def full_at(file: Path, number: int, code: int = errno.ENOSPC) -> Callable[[], None]:
    """The disk is full when that file is brought to it for the `number`th time."""

    now = kills.nth(number)

    def is_it(handle: int) -> bool:
        return file.exists() and os.path.samestat(os.fstat(handle), file.stat()) and now()

    return lambda: kills.before(os, "fsync", is_it, partial(is_full, code=code))


@pytest.mark.parametrize(
    ("file", "number", "code", "kept"),
    [
        ("log.jsonl", 1, errno.ENOSPC, "No checkpoint was written before"),
        ("log.jsonl", 4, errno.EDQUOT, "{run}/checkpoint-2 is whole"),  # after 1, 2 and its eval, 3
        ("usage.safetensors.draft", 1, errno.ENOSPC, "{run}/checkpoint-4 is whole"),
        ("result.json.draft", 1, errno.ENOSPC, "{run}/checkpoint-4 is whole"),
    ],
    ids=["first line", "a line", "usage", "result"],
)
def test_a_full_disk_between_checkpoints(
    file: str, number: int, code: int, kept: str, text: Path, finished: Path, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", small_run(text, steps=4, eval_every=2)
    outcome = airmoe_train(config, run, patch=full_at(run / file, number, code))
    remedy = f"Make room, then: airmoe train --resume {run}\n"
    assert_one_line(outcome, 1, "the disk is full", kept.format(run=run), remedy)
    assert list(run.glob("*.draft")) == []
    assert airmoe("train", "--resume", run).code == 0
    assert timeless_log(run) == timeless_log(finished)


def test_a_full_disk_before_there_is_a_run(text: Path, run: Path) -> None:
    """The remedy is to run the same command again, so it must not be refused then."""
    config = small_run(text, steps=1, eval_every=1)
    outcome = airmoe_train(config, run, patch=full_at(run / "run.json.draft", 1))
    assert_one_line(outcome, 1, "the disk is full", "run the same command again")
    assert airmoe_train(config, run).code == 0


def test_a_really_full_disk(text: Path, finished: Path, tmp_path: Path) -> None:
    """Room for one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    one = sum(file.stat().st_size for file in (finished / "checkpoint-2").iterdir())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={one * 3 // 2}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        outcome = airmoe_train(small_run(text, steps=4, eval_every=2), disk / "run")
        assert_one_line(outcome, 1, "disk is full", f"--resume {disk / 'run'}")
        (kept,) = checkpoints.checkpoints(disk / "run")
        assert step_of(kept) == 2 and tensors_of(kept)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert airmoe("train", "--resume", disk / "run").code == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def broken_tensorboard(number: int) -> Callable[[], None]:
    """From the event of that number on, its disk is full."""

    def patch() -> None:
        records = pytest.importorskip("tensorboard.summary.writer.record_writer")
        kills.before(records.RecordWriter, "write", kills.since(number), is_full)

    return patch


@pytest.mark.parametrize("number", [1, 3, 30], ids=["opening", "first line", "second line"])
def test_a_run_goes_on_without_its_tracker(number: int, text: Path, tmp_path: Path) -> None:
    config = small_run(text, steps=4, eval_every=2, track="tensorboard")
    outcome = airmoe_train(config, tmp_path / "run", patch=broken_tensorboard(number))
    assert outcome.code == 0 and outcome.err == ""
    assert (tmp_path / "run" / "result.json").exists()
    said = [line for line in outcome.out.splitlines() if "training.track=tensorboard" in line]
    assert len(said) == 1
    assert "is off for the rest of this run" in said[0] and "No space left on device" in said[0]


def test_a_tracker_does_not_hide_why_a_run_stops(text: Path, run: Path) -> None:

    def patch() -> None:
        broken_tensorboard(3)()
        full_at(run / "log.jsonl", 4)()

    config = small_run(text, steps=4, eval_every=2, track="tensorboard")
    outcome = airmoe_train(config, run, patch=patch)
    assert_one_line(outcome, 1, "the disk is full", f"{run}/checkpoint-2 is whole")


def poison(step: int) -> Callable[[], None]:
    """One weight becomes infinite before that step."""

    def job(loop: TrainingLoop, **_: Any) -> None:
        with torch.no_grad():
            loop.model.lm_head.weight[0, 0] = math.inf

    return lambda: kills.before(TrainingLoop, "_take_step", kills.is_step(step), job)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_no_number_stops_the_run(log_every: int, text: Path, run: Path) -> None:
    """With rare logs it is noticed at the next evaluation, and still knows the step."""
    config = small_run(text, steps=9, eval_every=3, log_every=log_every)
    outcome = airmoe_train(config, run, patch=poison(5))
    kept = f"{run}/checkpoint-3"
    assert_one_line(outcome, 1, "step 5", "not a finite number", kept, "learning_rate")
    assert [step_of(path) for path in checkpoints.checkpoints(run)] == [3]
    assert not (run / "result.json").exists()
    saved = load_file(run / "checkpoint-3" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    for line in (run / "log.jsonl").read_text().splitlines():
        assert json.loads(line)["step"] < 5 and math.isfinite(json.loads(line)["loss"])
    assert airmoe("train", "--resume", run).code == 0  # unpoisoned, it goes on


def test_a_gradient_that_is_no_number_stops_the_run(text: Path, run: Path) -> None:
    """The loss is fine, its gradient is not: nothing of that step may be saved."""

    def patch() -> None:
        now, original = kills.nth(3), loop.clip_grad_norm_

        def clip(parameters: Any, most: float) -> Any:
            weights = list(parameters)
            if now():
                weights[0].grad[0, 0] = math.nan
            return original(weights, most)

        loop.clip_grad_norm_ = clip

    config = small_run(text, steps=4, eval_every=3, log_every=1)
    outcome = airmoe_train(config, run, patch=patch)
    assert_one_line(outcome, 1, "step 3", "not a finite number", "No checkpoint was written")
    assert checkpoints.checkpoints(run) == []
