"""Checkpoints: written beside and renamed, so that a folder named checkpoint-N is always whole.

checkpoint-N/  model.safetensors, config.json  what `from_pretrained` reads
               tokenizer files                 of the data it was trained on
               optimizer.safetensors           by parameter name
               random-R.safetensors            random states and running loss of process R
               shortlists.safetensors          of AIR, where they live several steps
               usage.safetensors               tokens of each expert and cell in the evaluation
               training.json                   schedule, scaler, counters
               trainer_state.json              the Trainer's own
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from airmoe.errors import ConfigError, RunError
from airmoe.files import disk_is_full, read_json, sync_folder, sync_tree

NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL = ".partial"
USAGE = "usage.safetensors"


def checkpoints(run_folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [
        (int(match[1]), path)
        for path in run_folder.iterdir()
        if path.is_dir() and (match := NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def step_of(checkpoint: Path) -> int:
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def write_checkpoint(run_folder: Path, step: int, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write into a new folder, bring it to the disk, then give it its name."""
    final = run_folder / f"checkpoint-{step}"
    partial = run_folder / (final.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it wrote
    with _failure_explained(run_folder, step, partial):
        partial.mkdir()
        fill(partial)
        sync_tree(partial)
        if final.exists():  # the same step again, after a resume
            shutil.rmtree(final)
        partial.rename(final)
        sync_folder(run_folder)
    return final


@contextmanager
def _failure_explained(run_folder: Path, step: int, partial: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        full = disk_is_full(error) or "No space left" in str(error)  # safetensors gives no errno
        what = "the disk is full" if full else f"it failed ({error})"
        raise RunError(
            f"step {step}: while the checkpoint was written, {what}. {_how_to_go_on(run_folder)}"
        ) from error


@contextmanager
def full_disk_explained(run_folder: Path) -> Iterator[None]:
    """The same for everything else that a run writes."""
    try:
        yield
    except OSError as error:
        if not disk_is_full(error):
            raise
        raise RunError(f"the disk is full. {_how_to_go_on(run_folder)}") from error


def _how_to_go_on(run_folder: Path) -> str:
    kept = checkpoints(run_folder)
    whole = f"{kept[-1]} is whole." if kept else "No checkpoint was written before."
    return f"{whole} Make room, then: airmoe train --resume {run_folder}"


def remove_old(run_folder: Path, keep: int, best: Path | None) -> None:
    """Keep the best checkpoint and the newest ones, `keep` in all."""
    found = checkpoints(run_folder)
    protected = {best} & set(found)
    newest_first = [path for path in reversed(found) if path not in protected]
    for path in newest_first[keep - len(protected) :]:
        # Renamed first: a kill while files vanish must not leave something that looks whole.
        doomed = path.with_name(path.name + PARTIAL)
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def clean_up(run_folder: Path, keep: int) -> None:
    """Finish what a killed run left half done: folders without their name, a rotation."""
    for path in run_folder.glob(f"checkpoint-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    if checkpoints(run_folder):
        remove_old(run_folder, keep, best_checkpoint(run_folder))


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, "safetensors", error) from error


def load_json(path: Path) -> Any:
    """A JSON file of a checkpoint."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, "JSON", error) from error


def _damaged(path: Path, kind: str, error: Exception) -> ConfigError:
    return ConfigError(
        "checkpoint",
        str(path),
        f"must be a whole {kind} file ({error})",
        "Remove this checkpoint folder and resume from the one before.",
    )


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Weights and routing state of a checkpoint into a model of the same shape, sharded or not."""
    saved, own = load_tensors(checkpoint / "model.safetensors"), model.state_dict()
    try:
        placed = {name: _placed(tensor, own.get(name)) for name, tensor in saved.items()}
        result = model.load_state_dict(placed, strict=False)
    except RuntimeError as error:  # shapes differ
        raise _other_model(checkpoint, str(error).splitlines()[-1].strip()) from error
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if is_tied else set()
    if missing := sorted(set(result.missing_keys) - tied):
        raise _other_model(checkpoint, f"it lacks {missing[0]}")
    if result.unexpected_keys:
        raise _other_model(checkpoint, f"the model has no {result.unexpected_keys[0]}")


def _placed(tensor: Tensor, own: Tensor | None) -> Tensor:
    """Cut into shards where the model's own is, because whole tensors cannot be copied there."""
    if not isinstance(own, DTensor) or own.shape != tensor.shape:
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements)


def _other_model(checkpoint: Path, difference: str) -> ConfigError:
    return ConfigError(
        "checkpoint",
        str(checkpoint),
        f"must be of the same model as the run's config ({difference})",
        "The folder was changed or mixed with another run: start a new one.",
    )


def best_checkpoint(run_folder: Path) -> Path:
    """The kept checkpoint with the lowest validation loss, or the newest if none was evaluated."""
    found = checkpoints(run_folder)
    if not found:
        raise ConfigError(
            "run",
            str(run_folder),
            "must hold a checkpoint-N folder",
            "Train it first, or wait for its first evaluation.",
        )
    best_step = load_json(found[-1] / "trainer_state.json").get("best_global_step")
    return next((path for path in found if step_of(path) == best_step), found[-1])
