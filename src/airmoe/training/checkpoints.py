"""Checkpoints: written beside and renamed, so that a folder named checkpoint-N is always whole.

checkpoint-N/  model.safetensors, config.json  what `from_pretrained` reads
               tokenizer files                 of the data it was trained on
               optimizer.safetensors           by parameter name
               random-R.safetensors            random states and running loss of process R
               usage.safetensors               tokens of each expert and cell in the evaluation
               training.json                   step, best step, loss scale, times
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
from torch import Tensor

from airmoe.errors import ConfigError, RunError
from airmoe.files import disk_is_full, file_sha256, read_json, sync_folder, sync_tree, write_json

NAME = re.compile(r"checkpoint-(\d+)")
PARTIAL = ".partial"
OPTIMIZER, USAGE = "optimizer.safetensors", "usage.safetensors"
STATE, LOG, MANIFEST = "training.json", "log.jsonl", "manifest.json"
# Of run folders and of checkpoints; LAST_READERS names the last airmoe that can read older ones.
FORMAT, LAST_READERS = 2, {1: "0.1.0"}
ONLY_TO_RESUME = re.compile(rf"{OPTIMIZER}|random-\d+\.safetensors|{STATE}|{LOG}")
USE_THE_ONE_BEFORE = "Move this checkpoint folder elsewhere and resume from the one before."


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


def refused(path: Path, rule: str, remedy: str = USE_THE_ONE_BEFORE) -> ConfigError:
    """The error about a checkpoint or a file of it."""
    return ConfigError("checkpoint", str(path), rule, remedy)


# -- writing --------------------------------------------------------------------------------------


def write_checkpoint(
    run_folder: Path, step: int, run_sha256: str, fill: Callable[[Path], None]
) -> Path:
    """Let `fill` write into a new folder, bring it to the disk, then give it its name."""
    final = run_folder / f"checkpoint-{step}"
    partial = run_folder / (final.name + PARTIAL)
    try:
        _remove(partial)  # of a run that was killed while it wrote
        partial.mkdir()
        fill(partial)
        write_manifest(partial, step, run_sha256)
        sync_tree(partial)
        partial.rename(final)
        sync_folder(run_folder)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            _remove(partial)
        full = disk_is_full(error) or "No space left" in str(error)  # safetensors gives no errno
        what = "the disk is full" if full else f"it failed ({error})"
        raise RunError(
            f"step {step}: while the checkpoint was written, {what}. "
            f"{_how_to_go_on(run_folder, full=full)}"
        ) from error
    return final


def write_manifest(checkpoint: Path, step: int, run_sha256: str) -> None:
    """Record which step and run a checkpoint is of, and size and hash of each file."""
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
    paths = (path for path in checkpoint.rglob("*") if not path.is_dir())
    names = (path.relative_to(checkpoint).as_posix() for path in paths)
    return sorted(name for name in names if name != MANIFEST and not name.startswith("."))


@contextmanager
def full_disk_explained(run_folder: Path) -> Iterator[None]:
    """Says how to go on when the disk is full while anything else of a run is written."""
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

    Links are neither counted nor removed: they may lead to somebody else's files.
    """
    found = [path for path in checkpoints(run_folder) if not path.is_symlink()]
    protected = {best} & set(found)
    newest_first = [path for path in reversed(found) if path not in protected]
    for path in newest_first[keep - len(protected) :]:
        # Renamed first: a kill in the middle must not leave something that looks whole.
        doomed = path.with_name(path.name + PARTIAL)
        _remove(doomed)
        path.rename(doomed)
        _remove(doomed)


def clean_up(run_folder: Path, keep: int) -> None:
    """Finish what a killed run left half done: unnamed folders, removal of old checkpoints."""
    for path in run_folder.glob(f"checkpoint-*{PARTIAL}"):
        with suppress(OSError):
            _remove(path)
    if checkpoints(run_folder):
        remove_old(run_folder, keep, best_checkpoint(run_folder))


def _remove(path: Path) -> None:
    """A file, folder or link if it is there; of a link never what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- checking -------------------------------------------------------------------------------------


def check_checkpoint(checkpoint: Path, run_sha256: str, *, to_resume: bool) -> None:
    """Raise unless its files are those that this run wrote at this step.

    Not `to_resume`, only to use the model: of files that a resume alone reads the size is enough.
    """
    manifest = _read_manifest(checkpoint)
    if manifest["step"] != step_of(checkpoint):
        raise refused(
            checkpoint,
            f"must be the folder of step {manifest['step']}, as its {MANIFEST} says",
            f"Give it its name back: checkpoint-{manifest['step']}.",
        )
    if manifest["run_sha256"] != run_sha256:
        raise refused(
            checkpoint,
            f"must be of this run, but {checkpoint.parent / 'run.json'} has other settings or "
            "another text than those it was written with",
            "Put that file back as it was, or the run's own checkpoint here, or start a new run.",
        )
    listed, found = manifest["files"], _files(checkpoint)
    if extra := sorted(set(found) - listed.keys()):
        rule = f"must be a file that {MANIFEST} lists, or not be there"
        raise refused(checkpoint / extra[0], rule, "Move it out of the checkpoint.")
    if to_resume and LOG not in listed:
        raise refused(checkpoint, f"must hold a copy of the run's {LOG}, to go on from")
    for name in listed:
        by_hash = to_resume or ONLY_TO_RESUME.fullmatch(name) is None
        _check_file(checkpoint / name, listed[name], by_hash=by_hash)


def _check_file(path: Path, listed: dict[str, Any], *, by_hash: bool) -> None:
    if not path.is_file():
        difference = "it is missing"
    elif (size := path.stat().st_size) != listed["bytes"]:
        difference = f"it has {size} bytes instead of {listed['bytes']}"
    elif by_hash and file_sha256(path) != listed["sha256"]:
        difference = "its sha256 is another"
    else:
        return
    raise refused(path, f"must be whole, as its {MANIFEST} has it ({difference})")


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    if not path.exists():
        raise refused(
            checkpoint,
            f"must hold a {MANIFEST}, by which its files are recognized",
            f"{USE_THE_ONE_BEFORE} Its model alone: AirMoeForCausalLM.from_pretrained.",
        )
    values = load_json(path)
    kinds = {"format": int, "step": int, "run_sha256": str, "files": dict}
    checked_fields(path, values, kinds, USE_THE_ONE_BEFORE)
    check_format(f"{path}: format", values["format"])
    for name, listed in values["files"].items():
        kinds = {"bytes": int, "sha256": str}
        checked_fields(path, listed, kinds, USE_THE_ONE_BEFORE, f"files.{name}")
    return values


def check_format(field: str, found: object) -> None:
    """Refuse what another airmoe wrote, and name the one that can go on with it."""
    if found == FORMAT and type(found) is int:
        return
    remedy = "Use the airmoe version that wrote it (see versions in run.json)."
    if type(found) is int and found in LAST_READERS:
        remedy = f"The last version that can read it is {LAST_READERS[found]}; or start a new run."
    raise ConfigError(field, found, f"must be {FORMAT}, the format of this airmoe", remedy)


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
        raise refused(found[-1] / MANIFEST, f"must list {state.name}")
    _check_file(state, listed, by_hash=True)
    best_step = load_json(state).get("best_step")
    return next((path for path in found if step_of(path) == best_step), found[-1])


# -- files ----------------------------------------------------------------------------------------


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise refused(path, f"must be a whole safetensors file ({error})") from error


def load_json(path: Path, remedy: str = USE_THE_ONE_BEFORE) -> Any:
    """A JSON file, by default of a checkpoint."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise refused(path, f"must be a whole JSON file ({error})", remedy) from error


def checked_fields(
    path: Path, values: Any, kinds: dict[str, Any], remedy: str, parent: str = ""
) -> dict[str, Any]:
    """`values`, found in the JSON file `path`, if it has these fields of these types."""
    if not isinstance(values, dict):
        place = f"{path}: {parent}".rstrip(": ")
        raise ConfigError(place, type(values).__name__, "must be a JSON object", remedy)
    for name, kind in kinds.items():
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            field = f"{path}: {parent}.{name}" if parent else f"{path}: {name}"
            wanted = " or ".join(one.__name__ for one in (kind if type(kind) is tuple else (kind,)))
            shown = value if name in values else "nothing"
            raise ConfigError(field, shown, f"must be of type {wanted}", remedy)
    return values
