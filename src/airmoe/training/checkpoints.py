"""Checkpoints: written under another name and renamed, so that checkpoint-N is always complete.

checkpoint-N/  model.safetensors, config.json  what `from_pretrained` reads
               tokenizer files                 of the data it was trained on
               optimizer.safetensors           by parameter name
               random-R.safetensors            random state and running loss of process R
               usage.safetensors               tokens of each expert and cell in the evaluation
               training.json                   step, best step, loss scale, times
               log.jsonl                       copy of the run's log so far
               manifest.json                   run, size and sha256 of every other file
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError, RunError
from airmoe.files import disk_is_full, file_sha256, read_as, sync_folder, sync_tree, write_json

NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL = ".partial"
MODEL, CONFIG, USAGE = "model.safetensors", "config.json", "usage.safetensors"
OPTIMIZER, STATE = "optimizer.safetensors", "training.json"
LOG, MANIFEST = "log.jsonl", "manifest.json"
FORMAT = 2  # of run folders and of checkpoints
ONLY_TO_RESUME = re.compile(rf"{OPTIMIZER}|random-\d+\.safetensors|{LOG}")
USE_THE_ONE_BEFORE = "Move this checkpoint folder elsewhere and resume from the one before."
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW


class Listed(TypedDict):
    """A file in a manifest."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """What manifest.json holds."""

    format: int
    run_sha256: str
    files: dict[str, Listed]


@dataclass(frozen=True)
class Counters:
    """What training.json holds."""

    step: int
    best_step: int | None
    best_loss: float | None
    last_logged: int
    seconds: float
    training_seconds: float
    processes: int
    scaler: dict[str, Any]


def checkpoints(run_folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted((path for path in run_folder.iterdir() if NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def best_checkpoint(run_folder: Path) -> Path:
    """The kept checkpoint with the lowest validation loss, or the newest if none was evaluated."""
    found = checkpoints(run_folder)
    if not found:
        remedy = "Train it first, or wait for its first evaluation."
        raise ConfigError("run", str(run_folder), "must hold a checkpoint-N folder", remedy)
    check_files(found[-1], {STATE: read_manifest(found[-1])["files"].get(STATE)})
    best_step = read_counters(found[-1]).best_step
    return next((path for path in found if step_of(path) == best_step), found[-1])


def read_counters(checkpoint: Path) -> Counters:
    return read_as(Counters, checkpoint / STATE, USE_THE_ONE_BEFORE)


# -- folders --------------------------------------------------------------------------------------


def write_checkpoint(
    run_folder: Path, step: int, run_sha256: str, fill: Callable[[Path], None]
) -> None:
    """Let `fill` write into a new folder, flush it to the disk, then give it its name."""
    partial = run_folder / f"checkpoint-{step}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it wrote
    try:
        partial.mkdir()
        fill(partial)
        write_manifest(partial, run_sha256)
        sync_tree(partial)
        partial.rename(run_folder / f"checkpoint-{step}")
        sync_folder(run_folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # it would take room on a full disk
        raise _not_written(run_folder, error, f"step {step}: ") from error


def write_manifest(checkpoint: Path, run_sha256: str) -> None:
    """Record which run a checkpoint belongs to, and the size and hash of each file."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    files = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
        }
        for path in paths
        if path.name != MANIFEST
    }
    values = {"format": FORMAT, "run_sha256": run_sha256, "files": files}
    write_json(checkpoint / MANIFEST, values)


@contextmanager
def full_disk_explained(run_folder: Path) -> Iterator[None]:
    """Say how to go on if the disk is full when anything else of a run is written."""
    try:
        yield
    except OSError as error:
        if not disk_is_full(error):
            raise
        raise _not_written(run_folder, error) from error


def _not_written(run_folder: Path, error: Exception, when: str = "") -> RunError:
    full = disk_is_full(error) or "No space left" in str(error)  # safetensors' words
    what = "the disk is full" if full else f"the checkpoint could not be written ({error})"
    kept = checkpoints(run_folder)
    whole = f"{kept[-1]} is whole." if kept else "No checkpoint was written before."
    first = "Make room" if full else "Put that right"
    return RunError(f"{when}{what}. {whole} {first}, then: airmoe train --resume {run_folder}")


def remove_old(run_folder: Path, keep: int) -> None:
    """Keep the best checkpoint and the newest ones, `keep` in all.

    Links are neither counted nor removed: they may lead to somebody else's files.
    """
    found = [path for path in checkpoints(run_folder) if not path.is_symlink()]
    protected = {best_checkpoint(run_folder)} & set(found)
    newest_first = [path for path in reversed(found) if path not in protected]
    for path in newest_first[keep - len(protected) :]:
        # Renamed first: a kill in the middle must not leave something that looks whole.
        shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)))


def clean_up(run_folder: Path, keep: int) -> None:
    """Finish what a killed run left half done: unnamed folders, removal of old checkpoints."""
    for path in run_folder.glob(f"checkpoint-*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    if checkpoints(run_folder):
        remove_old(run_folder, keep)


def check_checkpoint(checkpoint: Path, run_sha256: str, *, to_resume: bool) -> None:
    """Raise unless its files are those that this run wrote.

    To use the model, without `to_resume`, the files that only resuming reads are not checked.
    """
    manifest = read_manifest(checkpoint)
    if manifest["run_sha256"] != run_sha256:
        raise refused(
            checkpoint,
            f"must be of this run, but {checkpoint.parent / 'run.json'} has other settings or "
            "another text than those it was written with",
            "Put that file back as it was, or the run's own checkpoint here, or start a new run.",
        )
    listed = {
        name: file
        for name, file in manifest["files"].items()
        if to_resume or not ONLY_TO_RESUME.fullmatch(name)
    }
    needed = (MODEL, CONFIG, STATE, *((OPTIMIZER, LOG) if to_resume else ()))
    check_files(checkpoint, {**dict.fromkeys(needed), **listed})
    if (step := read_counters(checkpoint).step) != step_of(checkpoint):
        rule = f"must be the folder of step {step}, as its {STATE} says"
        raise refused(checkpoint, rule, f"Give it its name back: checkpoint-{step}.")


def read_manifest(checkpoint: Path) -> Manifest:
    file = checkpoint / MANIFEST
    return read_as(Manifest, file, USE_THE_ONE_BEFORE, check=lambda got: check_format(file, got))


def check_files(checkpoint: Path, files: dict[str, Listed | None]) -> None:
    """Raise unless these files of a checkpoint are as its manifest lists them."""
    for name, listed in files.items():
        path = checkpoint / name
        if not path.is_file():
            difference = "it is missing"
        elif listed is None:
            difference = "it is not listed there"
        elif (size := path.stat().st_size) != listed["bytes"]:
            difference = f"it has {size} bytes instead of {listed['bytes']}"
        elif file_sha256(path) != listed["sha256"]:
            difference = "its sha256 differs"
        else:
            continue
        raise refused(path, f"must be whole, as its {MANIFEST} has it ({difference})")


def check_format(file: Path, values: Any) -> None:
    """Refuse what another airmoe wrote, and name the one that can go on with it."""
    found = values.get("format") if isinstance(values, dict) else values
    if type(found) is not int or found != FORMAT:
        remedy = "Use the airmoe version that wrote it (see versions in run.json)."
        if found == 1:
            remedy = "The last version that can read it is 0.1.0; or start a new run."
        rule = f"must be {FORMAT}, the format of this airmoe"
        raise ConfigError(f"{file}: format", found, rule, remedy)


def refused(path: Path, rule: str, remedy: str = USE_THE_ONE_BEFORE) -> ConfigError:
    """The error about a checkpoint or a file of it."""
    return ConfigError("checkpoint", str(path), rule, remedy)


# -- tensors --------------------------------------------------------------------------------------


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(
    file: Path, like: dict[str, Tensor], *, may_be_empty: bool = False, free: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a file, if they have the names, shapes and dtypes of those in `like`.

    Checked before any is used: fused AdamW would write beyond a moment that is too short, and a
    transposed one would change the run silently. Those named in `free` may be there or not.
    """
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise refused(file, f"must be a whole safetensors file ({error})") from error
    if may_be_empty and not found:
        return found
    for name in sorted((found.keys() | like.keys()) - {*free}):
        one, wanted = (_kind(tensors.get(name)) for tensors in (found, like))
        if one != wanted:
            raise refused(file, f"must have {name!r} as the model needs it: {wanted}, not {one}")
    return found


def _kind(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{[*tensor.shape]} of {tensor.dtype}"


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Weights and routing state of a checkpoint into its model, sharded or not."""
    own, alone = model.state_dict(), {*dict(model.named_parameters()), *dict(model.named_buffers())}
    like = {name: tensor for name, tensor in own.items() if name in alone}
    saved = load_tensors(checkpoint / MODEL, like, free=own.keys() - alone)  # tied: in it or not
    placed = {name: _sharded_like(own[name], tensor) for name, tensor in saved.items()}
    model.load_state_dict(placed, strict=False)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<entry>` -> tensor on the CPU. Gathers what is sharded: call on all ranks."""
    entries = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            entries[f"{name}/{key}"] = full_tensor(torch.as_tensor(value)).detach().cpu().clone()
    return entries


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, file: Path, *, may_be_new: bool = False
) -> None:
    """Give every parameter its entries back, sharded as the parameter is.

    `may_be_new`: the file may be empty, if the optimizer skipped every step.
    """
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    count = torch.zeros(())
    like = {
        f"{name}/{key}": count if key == "step" else one
        for name, one in trained.items()
        for key in MOMENTS
    }
    entries = load_tensors(file, like, may_be_empty=may_be_new)
    if not entries:
        return
    for name, parameter in trained.items():
        # Copies, because a loaded tensor shares its file's memory. Fused AdamW wants the step on
        # the device too.
        found = {key: entries[f"{name}/{key}"].to(parameter.device) for key in MOMENTS}
        optimizer.state[parameter] = {
            key: _sharded_like(parameter, value).clone() for key, value in found.items()
        }


def _sharded_like(own: Tensor, tensor: Tensor) -> Tensor:
    """Cut into shards where the model's own is, because whole tensors cannot be copied there."""
    if not isinstance(own, DTensor) or own.shape != tensor.shape:
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements)


def random_state() -> dict[str, Tensor]:
    """The generators of this process from which a training step may draw."""
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Go on from where `random_state` was taken."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
