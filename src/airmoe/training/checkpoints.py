"""Checkpoints: written beside and renamed, so that a folder named checkpoint-N is always whole.

checkpoint-N/  model.safetensors, config.json  what `from_pretrained` reads
               tokenizer files                 of the data it was trained on
               optimizer.safetensors           by parameter name
               random-R.safetensors            random states and running loss of process R
               usage.safetensors               tokens of each expert and cell in the evaluation
               training.json                   step, best step, schedule, loss scale, times
               log.jsonl                       copy of the run's log so far
               manifest.json                   step, run, size and sha256 of every other file
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from airmoe.errors import ConfigError, RunError
from airmoe.files import disk_is_full, file_sha256, read_json, sync_folder, sync_tree, write_json
from airmoe.training.state import OPTIMIZER

NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL = ".partial"
USAGE, STATE, LOG = "usage.safetensors", "training.json", "log.jsonl"
MANIFEST = "manifest.json"
# Of run folders and of checkpoints; LAST_READERS names the last airmoe that takes up older ones.
FORMAT, LAST_READERS = 2, {1: "0.1.0"}
ONLY_TO_RESUME = re.compile(rf"{OPTIMIZER}|random-\d+\.safetensors|{STATE}|{LOG}")
FROM_THE_ONE_BEFORE = "Remove this checkpoint folder and resume from the one before."


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


def write_checkpoint(
    run_folder: Path, step: int, run_sha256: str, fill: Callable[[Path], None]
) -> Path:
    """Let `fill` write into a new folder, bring it to the disk, then give it its name."""
    final = run_folder / f"checkpoint-{step}"
    partial = run_folder / (final.name + PARTIAL)
    with _failure_explained(run_folder, step, partial):
        _remove(partial)  # of a run that was killed while it wrote
        partial.mkdir()
        fill(partial)
        write_manifest(partial, step, run_sha256)
        sync_tree(partial)
        partial.rename(final)
        sync_folder(run_folder)
    return final


def write_manifest(checkpoint: Path, step: int, run_sha256: str) -> None:
    """Say what a checkpoint is of, and how to recognize each of its files."""
    files = {
        name: {
            "bytes": (checkpoint / name).stat().st_size,
            "sha256": file_sha256(checkpoint / name),
        }
        for name in _files(checkpoint)
    }
    values = {"format": FORMAT, "step": step, "run_sha256": run_sha256, "files": files}
    write_json(checkpoint / MANIFEST, values)


def _files(checkpoint: Path) -> list[str]:
    """What a manifest lists; hidden files are the system's, not ours."""
    names = (
        path.relative_to(checkpoint).as_posix()
        for path in checkpoint.rglob("*")
        if not path.is_dir()
    )
    return sorted(name for name in names if name != MANIFEST and not name.startswith("."))


def check_checkpoint(checkpoint: Path, run_sha256: str, *, to_resume: bool) -> None:
    """Raise unless its files are those that this run wrote at this step.

    Otherwise a run would go on as another one, or a model answer as another one, without a word.
    To use the model alone, of what only a resume reads the size is enough.
    """
    manifest = _read_manifest(checkpoint)
    if manifest["step"] != step_of(checkpoint):
        raise ConfigError(
            "checkpoint",
            str(checkpoint),
            f"must be the folder of step {manifest['step']}, as its {MANIFEST} says",
            f"Give it its name back: checkpoint-{manifest['step']}.",
        )
    if manifest["run_sha256"] != run_sha256:
        raise ConfigError(
            "checkpoint",
            str(checkpoint),
            f"must be of this run, but {checkpoint.parent / 'run.json'} has other settings or "
            "another text than those it was written with",
            "Put that file back as it was, or the run's own checkpoint here, or start a new run.",
        )
    listed, found = manifest["files"], _files(checkpoint)
    if extra := sorted(set(found) - listed.keys()):
        raise ConfigError(
            "checkpoint",
            str(checkpoint / extra[0]),
            f"must be a file that {MANIFEST} lists, or not be there",
            "Move it out of the checkpoint.",
        )
    if to_resume and LOG not in listed:
        raise ConfigError(
            "checkpoint",
            str(checkpoint),
            f"must hold a copy of the run's {LOG}, to go on from",
            FROM_THE_ONE_BEFORE,
        )
    for name in listed:
        _check_file(checkpoint / name, listed[name], by_hash=to_resume or not _only_to_resume(name))


def _only_to_resume(name: str) -> bool:
    return ONLY_TO_RESUME.fullmatch(name) is not None


def _check_file(path: Path, listed: dict[str, Any], *, by_hash: bool) -> None:
    if not path.is_file():
        difference = "it is missing"
    elif (size := path.stat().st_size) != listed["bytes"]:
        difference = f"it has {size} bytes instead of {listed['bytes']}"
    elif by_hash and file_sha256(path) != listed["sha256"]:
        difference = "its sha256 is another"
    else:
        return
    raise ConfigError(
        "checkpoint",
        str(path),
        f"must be whole, as its {MANIFEST} has it ({difference})",
        FROM_THE_ONE_BEFORE,
    )


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    if not path.exists():
        raise ConfigError(
            "checkpoint",
            str(checkpoint),
            f"must hold a {MANIFEST}, by which its files are recognized",
            f"{FROM_THE_ONE_BEFORE} Its model alone: AirMoeForCausalLM.from_pretrained.",
        )
    values = load_json(path)
    kinds = {"format": int, "step": int, "run_sha256": str, "files": dict}
    checked_fields(path, values, kinds, FROM_THE_ONE_BEFORE)
    check_format(f"{path}: format", values["format"])
    for name, listed in values["files"].items():
        kinds = {"bytes": int, "sha256": str}
        checked_fields(path, listed, kinds, FROM_THE_ONE_BEFORE, f"files.{name}")
    return values


def check_format(field: str, found: object) -> None:
    """Refuse what another airmoe wrote; it says which one can go on with it."""
    if found == FORMAT and type(found) is int:
        return
    remedy = "Use the airmoe version that wrote it (see versions in run.json)."
    if type(found) is int and found in LAST_READERS:
        remedy = f"The last version that can read it is {LAST_READERS[found]}; or start a new run."
    raise ConfigError(field, found, f"must be {FORMAT}, the format of this airmoe", remedy)


def checked_fields(
    path: Path, values: Any, kinds: dict[str, Any], remedy: str, parent: str = ""
) -> dict[str, Any]:
    """`values`, found in the JSON file `path`, if it has these fields of these types."""
    place = f"{path}: {parent}".rstrip(": ")
    if not isinstance(values, dict):
        raise ConfigError(place, type(values).__name__, "must be a JSON object", remedy)
    for name, kind in kinds.items():
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            field = f"{path}: {parent}.{name}" if parent else f"{path}: {name}"
            wanted = " or ".join(one.__name__ for one in (kind if type(kind) is tuple else (kind,)))
            shown = value if name in values else "nothing"
            raise ConfigError(field, shown, f"must be of type {wanted}", remedy)
    return values


@contextmanager
def _failure_explained(run_folder: Path, step: int, partial: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            _remove(partial)
        full = disk_is_full(error) or "No space left" in str(error)  # safetensors gives no errno
        what = "the disk is full" if full else f"it failed ({error})"
        raise RunError(
            f"step {step}: while the checkpoint was written, {what}. "
            f"{_how_to_go_on(run_folder, full=full)}"
        ) from error


@contextmanager
def full_disk_explained(run_folder: Path) -> Iterator[None]:
    """The same for everything else that a run writes."""
    try:
        yield
    except OSError as error:
        if not disk_is_full(error):
            raise
        raise RunError(f"the disk is full. {_how_to_go_on(run_folder, full=True)}") from error


def _how_to_go_on(run_folder: Path, *, full: bool) -> str:
    kept = checkpoints(run_folder)
    whole = f"{kept[-1]} is whole." if kept else "No checkpoint was written before."
    repair = "Make room" if full else "Put that right"
    return f"{whole} {repair}, then: airmoe train --resume {run_folder}"


def remove_old(run_folder: Path, keep: int, best: Path | None) -> None:
    """Keep the best checkpoint and the newest ones, `keep` in all.

    One that is a link is not counted: it may lead to what is not ours to remove.
    """
    found = [path for path in checkpoints(run_folder) if not path.is_symlink()]
    protected = {best} & set(found)
    newest_first = [path for path in reversed(found) if path not in protected]
    for path in newest_first[keep - len(protected) :]:
        # Renamed first: a kill while files vanish must not leave something that looks whole.
        doomed = path.with_name(path.name + PARTIAL)
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)


def clean_up(run_folder: Path, keep: int) -> None:
    """Finish what a killed run left half done: folders without their name, a rotation."""
    for path in run_folder.glob(f"checkpoint-*{PARTIAL}"):
        with suppress(OSError):
            _remove(path)
    if checkpoints(run_folder):
        remove_old(run_folder, keep, best_checkpoint(run_folder))


def _remove(path: Path) -> None:
    """Something of ours, if it is there; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, "safetensors", error) from error


def load_json(path: Path, remedy: str = FROM_THE_ONE_BEFORE) -> Any:
    """A JSON file, of a checkpoint where nothing else is said."""
    try:
        return read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, "JSON", error, remedy) from error


def _damaged(
    path: Path, kind: str, error: Exception, remedy: str = FROM_THE_ONE_BEFORE
) -> ConfigError:
    return ConfigError(
        "checkpoint",
        str(path),
        f"must be a whole {kind} file ({error})",
        remedy,
    )


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Weights and routing state of a checkpoint into a model of the same shape, sharded or not."""
    saved, own = load_tensors(checkpoint / "model.safetensors"), model.state_dict()
    for name, tensor in saved.items():
        if name in own and own[name].dtype != tensor.dtype:
            raise _other_model(checkpoint, f"{name} is of {tensor.dtype}, not {own[name].dtype}")
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
    state = found[-1] / STATE
    listed = _read_manifest(found[-1])["files"].get(state.name)
    if listed is None:
        raise _damaged(found[-1] / MANIFEST, "JSON", KeyError(f"files.{state.name}"))
    _check_file(state, listed, by_hash=True)
    best_step = load_json(state).get("best_step")
    return next((path for path in found if step_of(path) == best_step), found[-1])
