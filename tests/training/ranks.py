"""What each of two processes does: `torchrun ... -m tests.training.ranks FOLDER JOB ...`.

A start of two processes takes seconds, so one start does several jobs one after another.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from airmoe.data import open_prepared
from airmoe.distributed import full_tensor, rank, world_size
from airmoe.errors import ConfigError, RunError
from airmoe.routers import Router
from airmoe.training import RunConfig, checkpoints, evaluate
from airmoe.training.loop import TrainingLoop
from airmoe.training.run import measure_test
from airmoe.training.run_folder import open_run
from airmoe.training.trained import load_trained
from tests.training import kills
from tests.training.runs import quiet, resume_here, train_here

SEEN: list[TrainingLoop] = []


def remember_loops() -> None:
    original = TrainingLoop.__init__

    def init(self: TrainingLoop, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        SEEN.append(self)

    setattr(TrainingLoop, "__init__", init)  # noqa: B010


def train_and_save_codebooks(folder: Path, name: str) -> None:
    """A run, and what this rank's routers hold when it is over."""
    train_here(read_config(folder, name), folder / name)
    assert world_size() == 2
    buffers = {
        f"{place}.{buffer}": value.clone()
        for place, router in enumerate(
            module for module in SEEN[-1].model.modules() if isinstance(module, Router)
        )
        for buffer, value in router.named_buffers()
    }
    save_file(buffers, folder / f"{name}-{rank()}.safetensors")


def read_config(folder: Path, name: str) -> RunConfig:
    return RunConfig.from_json(json.loads((folder / f"{name}.json").read_text()))


def evaluate_together(folder: Path, name: str) -> None:
    """9, 4 and 2 blocks in batches of 4: one rank has a batch too many, or none at all."""
    trained = load_trained(folder / name)
    numbers = {}
    for count in (9, 4, 2):
        blocks = torch.load(folder / "blocks.pt")[:count]
        result = evaluate(trained.model, blocks, batch_size=4, quality_tokens=10_000)
        numbers[count] = {"tokens": result.tokens, **result.numbers()}
    (folder / f"evaluation-{rank()}.json").write_text(json.dumps(numbers))


def measure(folder: Path, name: str) -> None:
    """The end of the run just trained, as if its validation text were a test split."""
    run, data = open_run(folder / name), open_prepared(folder / "tokens")
    splits = {"test": data.manifest.splits["validation"]}
    test = replace(data, manifest=replace(data.manifest, splits=splits))
    measure_test(run, test, SEEN[-1].model, quiet())
    if rank() == 0:
        run.test.rename(folder / f"{name}-test.json")


def killed(folder: Path, name: str) -> None:
    kills.at_micro_batch(7)()
    train_here(read_config(folder, name), folder / name)


class BrokenOffError(Exception): ...


def broken(folder: Path, name: str) -> None:
    """Both processes stop in the seventh step, but live on for the next job."""
    break_off(7, lambda: train_here(read_config(folder, name), folder / name))


def break_off(micro_batch: int, job: Callable[[], None]) -> None:
    """Leave `job` in the micro-batch of that number."""
    original = TrainingLoop._forward_backward

    def stop(*_: Any) -> None:
        raise BrokenOffError

    kills.before(TrainingLoop, "_forward_backward", kills.nth(micro_batch), stop)
    try:
        job()
    except BrokenOffError:
        TrainingLoop._forward_backward = original


def take_up(run: Path, name: str) -> None:
    """Load a run's newest checkpoint for the steps to come, and write down what was loaded.

    Nothing is trained: what another number of processes makes of it differs in the last bit.
    """
    break_off(1, lambda: resume_here(run))
    loop = SEEN[-1]
    weights = {
        key: full_tensor(value).detach().cpu().clone()
        for key, value in loop.model.state_dict().items()
    }
    moments = checkpoints.optimizer_state(loop.model, loop.optimizer)
    numbers = {
        "steps": torch.tensor([loop.step]),
        "running_loss": loop._running_loss.reshape(1),
        "shards": torch.tensor([isinstance(one, DTensor) for one in loop.model.parameters()]),
    }
    save_file(
        {
            f"{part}/{key}": value
            for part, values in {"model": weights, "optimizer": moments, "loop": numbers}.items()
            for key, value in values.items()
        },
        run.parent / f"{name}-{rank()}.safetensors",
    )


def take_up_together(folder: Path, name: str) -> None:
    assert world_size() == 2
    take_up(folder / name, f"{name}-by-two")


def copy(folder: Path, name: str) -> None:
    """The run as it stands, for the test to go on with."""
    if rank() == 0:
        shutil.copytree(folder / name, folder / f"{name}-copy")
    torch.distributed.barrier()


def refused(folder: Path, name: str) -> None:
    """A new run where there is one already: every rank says so, and none waits for another."""
    try:
        train_here(read_config(folder, "full"), folder / name)
    except ConfigError as error:
        (folder / f"refused-{rank()}.txt").write_text(str(error))


def fail(folder: Path, name: str) -> None:
    """The disk of the first process is full: the second must hear of it."""

    def save_tensors(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    original = checkpoints.save_tensors
    checkpoints.save_tensors = save_tensors
    try:
        train_here(read_config(folder, name), folder / name)
    except RunError as error:
        (folder / f"{name}-{rank()}.txt").write_text(str(error))
    finally:
        checkpoints.save_tensors = original


JOBS: dict[str, Callable[[Path, str], None]] = {
    "train": train_and_save_codebooks,
    "resume": lambda folder, name: resume_here(folder / name),
    "evaluate": evaluate_together,
    "measure": measure,
    "killed": killed,
    "broken": broken,
    "copy": copy,
    "take_up": take_up_together,
    "refused": refused,
    "fail": fail,
}


def main() -> None:
    remember_loops()
    folder = Path(sys.argv[1])
    for job in sys.argv[2:]:
        what, _, name = job.partition(":")
        JOBS[what](folder, name)
        print(f"done: {job}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
