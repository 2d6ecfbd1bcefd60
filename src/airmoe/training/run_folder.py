"""A run's folder: what was asked for, with which versions, and how far it came.

RUN/  run.json         settings, hash and recipe of the text, versions, git state, machine, and
                       which convention its balance loss has
      lock             who trains it, while somebody does
      log.jsonl        one line per log or evaluation
      checkpoint-N/    see checkpoints.py
      tensorboard/     the same numbers, where training.track asks for it
      test.json        the best checkpoint on the test split, where the text has one
      result.json      when it is finished
      usage.safetensors  then too: which experts the best checkpoint uses
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from airmoe import __version__
from airmoe.data import Prepared
from airmoe.errors import ConfigError
from airmoe.files import LOCK, check_unlocked, locked, read_json, write_json
from airmoe.losses import BALANCE
from airmoe.training.checkpoints import FORMAT, LOG, check_format, checked_fields, load_json
from airmoe.training.config import RunConfig

TRAINED = "is being trained"
PUT_BACK = "Put the file back as it was, or start a new run."
UNUSED = (LOCK, "run.json.draft")  # what a kill leaves of a run that was not one yet
PACKAGES = ("transformers", "accelerate", "safetensors", "tokenizers", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """An existing run folder and the settings in it."""

    path: Path
    config: RunConfig

    @property
    def log(self) -> Path:
        return self.path / LOG

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def test(self) -> Path:
        return self.path / "test.json"

    def sha256(self) -> str:
        """One number for settings and text: which run a checkpoint belongs to.

        Of what run.json says, because options that a later version adds make no other run.
        """
        values = read_json(self.path / "run.json")
        settings = {name: value for name, value in values["config"].items() if name != "preset"}
        return _digest({"config": settings, "data_sha256": values.get("data_sha256")})

    def lock(self) -> AbstractContextManager[None]:
        """Keep others out of a run that goes on."""
        return locked(self.path, "run", TRAINED)


@contextmanager
def claimed(path: Path, config: RunConfig) -> Iterator[None]:
    """Make and lock the folder of a new run; without a run in the end, it is removed again.

    One that failed before the first line of its log is none: the corrected command needs the place.
    """
    check_free(path, config)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with locked(path, "run", TRAINED):
        unused = UNUSED
        try:
            check_free(path, config)  # again: now nobody else can make one
            yield
        except BaseException:
            unused = (*UNUSED, "run.json")
            raise
        finally:
            if {*os.listdir(path)} <= {*unused}:
                for name in unused:
                    (path / name).unlink(missing_ok=True)
                with suppress(OSError):  # a parent in which something else is now
                    for folder in made:
                        folder.rmdir()


def create_run(path: Path, config: RunConfig, prepared: Prepared) -> RunFolder:
    """Write what a new run is into its claimed folder."""
    write_json(
        path / "run.json",
        {
            "format": FORMAT,
            "config": config.to_json(),
            "data_sha256": data_sha256(prepared),
            "data_recipe": asdict(prepared.manifest.recipe),
            "versions": versions(),
            "git": git_state(),
            "machine": machine(),
            "balance": BALANCE,
        },
    )
    return RunFolder(path, config)


def check_free(path: Path, config: RunConfig) -> None:
    """Raise unless a new run may be made there."""
    # A link that leads nowhere does not exist, but no folder can be made in its place.
    if os.path.lexists(path) and not (path.is_dir() and {*os.listdir(path)} <= {*UNUSED}):
        check_unlocked(path, "run", TRAINED)
        raise ConfigError("run", str(path), *_occupied(path, config))


def _occupied(path: Path, config: RunConfig) -> tuple[str, str]:
    """Rule and remedy for a folder that is not free."""
    try:
        same = open_run(path).config == config
    except ConfigError:
        return "must be a new or empty folder", "Choose another with --run."
    if same:
        return "holds this very run already", f"Go on with it: airmoe train --resume {path}"
    return (
        "holds a run with another config",
        f"Choose another folder with --run, or go on with that run: airmoe train --resume {path}",
    )


def open_run(path: Path) -> RunFolder:
    """Read the folder of an earlier run."""
    file = path / "run.json"
    if not file.is_file():
        raise ConfigError(
            "run", str(path), "must be a run folder with a run.json", "Give the folder of a run."
        )
    try:
        values = read_json(file)
        found = values["format"]
        config = values["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "run", str(file), f"must be JSON with format and config ({error})", "Start a new run."
        ) from error
    check_format("run.format", found)
    return RunFolder(path, RunConfig.from_json(config))


def read_result(file: Path) -> dict[str, Any]:
    """A result.json, with what is read of it."""
    again = f"Remove the file and resume the run: airmoe train --resume {file.parent}"
    values = load_json(file, again)
    number = (int, float)
    kinds = {"best": dict, "last": dict, "seconds": number}
    checked_fields(file, values, kinds | {"tokens_per_second": (*number, type(None))}, again)
    best = {"loss": number, "perplexity": number}
    checked_fields(file, values["best"], best, again, "best")
    checked_fields(file, values["last"], {"step": int}, again, "last")
    return values


def read_test(file: Path) -> dict[str, Any]:
    """A test.json, with what is read of it."""
    again = "Remove the file and resume the run: the test split is measured again."
    number = (int, float)
    kinds = {"step": int, "tokens": int, "loss": number, "perplexity": number}
    return checked_fields(file, load_json(file, again), kinds, again)


def data_sha256(prepared: Prepared) -> str:
    """One number for the tokens of a run, whatever the text's folders and files are called."""
    manifest = prepared.manifest
    shards = {
        name: [shard.sha256 for shard in split.shards] for name, split in manifest.splits.items()
    }
    return _digest({"tokenizer": manifest.tokenizer.sha256, "shards": shards})


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_same_data(run: RunFolder, prepared: Prepared) -> None:
    """Raise if the text changed since the run began: it would go on as another run."""
    file = run.path / "run.json"
    values = read_json(file)
    found = values.get("data_sha256")
    if found != data_sha256(prepared):
        raise ConfigError(
            "data.folder",
            str(prepared.folder),
            f"must hold the text with which {run.path} began",
            "Put that back, or start a new run.",
        )
    # What its result will repeat.
    checked_fields(file, values, {"versions": dict, "git": dict, "machine": dict}, PUT_BACK)


def versions() -> dict[str, str]:
    """Python and the packages that decide what a run computes."""
    # torch with its build, which metadata may lack.
    found = {"airmoe": __version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_state() -> dict[str, Any]:
    """Commit of the code that runs, and whether it was changed since; None outside a checkout.

    AIRMOE_COMMIT, where it is set, names the commit of a copy that lies in another repository.
    """
    if told := os.environ.get("AIRMOE_COMMIT"):
        return {"commit": told, "changed": None}
    root = Path(__file__).parents[3]
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "changed": None}
    return {"commit": commit, "changed": bool(_git(root, "status", "--porcelain"))}


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    """What the numbers of a run depend on besides the code."""
    if torch.cuda.is_available():
        return {"device": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    return {"device": platform.processor() or platform.machine(), "count": torch.get_num_threads()}
