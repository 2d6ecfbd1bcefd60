"""Checkpoints: written beside and renamed, so that a folder named checkpoint-N is always whole.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError, RunError
from airmoe.files import disk_is_full, file_sha256, read_json, sync_folder, sync_tree, write_json

NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL = ".partial"
MODEL, OPTIMIZER, USAGE = "model.safetensors", "optimizer.safetensors", "usage.safetensors"
STATE, LOG, MANIFEST = "training.json", "log.jsonl", "manifest.json"
FORMAT = 2  # of run folders and of checkpoints
ONLY_TO_RESUME = re.compile(rf"{OPTIMIZER}|random-\d+\.safetensors|{LOG}")
USE_THE_ONE_BEFORE = "Move this checkpoint folder elsewhere and resume from the one before."
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW


def checkpoints(run_folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted((path for path in run_folder.iterdir() if NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


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
    best_step = load_json(found[-1] / STATE)["best_step"]
    return next((path for path in found if step_of(path) == best_step), found[-1])


# -- folders --------------------------------------------------------------------------------------


def write_checkpoint(
    run_folder: Path, step: int, run_sha256: str, fill: Callable[[Path], None]
) -> None:
    """Let `fill` write into a new folder, bring it to the disk, then give it its name."""
    partial = run_folder / f"checkpoint-{step}{PARTIAL}"
    with full_disk_explained(run_folder, f"step {step}: "):
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it wrote
        partial.mkdir()
        fill(partial)
        write_manifest(partial, run_sha256)
        sync_tree(partial)
        partial.rename(run_folder / f"checkpoint-{step}")
        sync_folder(run_folder)


def write_manifest(checkpoint: Path, run_sha256: str) -> None:
    """Record of which run a checkpoint is, and size and hash of each file."""
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
def full_disk_explained(run_folder: Path, when: str = "") -> Iterator[None]:
    """Say how to go on when the disk is full while a run's files are written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not disk_is_full(error) and "No space left" not in str(error):  # safetensors' words
            raise
        kept = checkpoints(run_folder)
        whole = f"{kept[-1]} is whole." if kept else "No checkpoint was written before."
        remedy = f"Make room, then: airmoe train --resume {run_folder}"
        raise RunError(f"{when}the disk is full. {whole} {remedy}") from error


def remove_old(run_folder: Path, keep: int, best: Path | None) -> None:
    """Keep the best checkpoint and the newest ones, `keep` in all."""
    found = checkpoints(run_folder)
    protected = {best} & set(found)
    newest_first = [path for path in reversed(found) if path not in protected]
    for path in newest_first[keep - len(protected) :]:
        # Renamed first: a kill in the middle must not leave something that looks whole.
        shutil.rmtree(path.rename(path.with_name(path.name + PARTIAL)))


def clean_up(run_folder: Path, keep: int) -> None:
    """Finish what a killed run left half done: unnamed folders, removal of old checkpoints."""
    for path in run_folder.glob(f"checkpoint-*{PARTIAL}"):
        shutil.rmtree(path)
    if checkpoints(run_folder):
        remove_old(run_folder, keep, best_checkpoint(run_folder))


def check_checkpoint(checkpoint: Path, run_sha256: str, *, to_resume: bool) -> None:
    """Raise unless its files are those that this run wrote.

    Not `to_resume`, only to use the model: files that a resume alone reads are left out.
    """
    manifest = load_json(checkpoint / MANIFEST)
    check_format(checkpoint / MANIFEST, manifest["format"])
    if manifest["run_sha256"] != run_sha256:
        raise refused(
            checkpoint,
            f"must be of this run, but {checkpoint.parent / 'run.json'} has other settings or "
            "another text than those it was written with",
            "Put that file back as it was, or the run's own checkpoint here, or start a new run.",
        )
    for name, listed in manifest["files"].items():
        path = checkpoint / name
        if ONLY_TO_RESUME.fullmatch(name) and not to_resume:
            continue
        if not path.is_file():
            difference = "it is missing"
        elif (size := path.stat().st_size) != listed["bytes"]:
            difference = f"it has {size} bytes instead of {listed['bytes']}"
        elif file_sha256(path) != listed["sha256"]:
            difference = "its sha256 is another"
        else:
            continue
        raise refused(path, f"must be whole, as its {MANIFEST} has it ({difference})")


def check_format(file: Path, found: object) -> None:
    """Refuse what another airmoe wrote, and name the one that can go on with it."""
    if found != FORMAT:
        remedy = "Use the airmoe version that wrote it (see versions in run.json)."
        if found == 1:
            remedy = "The last version that can read it is 0.1.0; or start a new run."
        rule = f"must be {FORMAT}, the format of this airmoe"
        raise ConfigError(f"{file}: format", found, rule, remedy)


def refused(path: Path, rule: str, remedy: str = USE_THE_ONE_BEFORE) -> ConfigError:
    """The error about a checkpoint or a file of it."""
    return ConfigError("checkpoint", str(path), rule, remedy)


def load_json(path: Path, remedy: str = USE_THE_ONE_BEFORE) -> dict[str, Any]:
    """A JSON file that airmoe wrote."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError("file", str(path), f"cannot be read ({error})", remedy) from error


# -- tensors --------------------------------------------------------------------------------------


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Weights and routing state of a checkpoint into its model, sharded or not."""
    saved, own = load_file(checkpoint / MODEL), model.state_dict()
    placed = {name: _sharded_like(own[name], tensor) for name, tensor in saved.items()}
    result = model.load_state_dict(placed, strict=False)
    tied = getattr(model, "_tied_weights_keys", None) or ()  # saved once
    assert not {*result.missing_keys} - {*tied} and not result.unexpected_keys, result


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<entry>` -> tensor on the CPU. Gathers what is sharded: call on all ranks."""
    entries = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            entries[f"{name}/{key}"] = full_tensor(torch.as_tensor(value)).detach().cpu().clone()
    return entries


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, file: Path) -> None:
    """Give every parameter its entries back, sharded as the parameter is."""
    entries = load_file(file)
    if not entries:  # fp16 has skipped every step
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Copies, because a loaded tensor shares its file's memory. Fused AdamW wants the step
            # on the device too.
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
