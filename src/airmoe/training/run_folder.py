"""A run's folder: what was asked for, with which versions, and how far it came.

RUN/  run.json         settings, hash and recipe of the text, versions, git state, machine
      log.jsonl        one line per log or evaluation
      checkpoint-N/    see checkpoints.py
      tensorboard/     the same numbers for TensorBoard
      test.json        the best checkpoint on the test split, where the text has one
      result.json      when it is finished
      usage.safetensors  then too: which experts the best checkpoint uses
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from airmoe.data import Prepared
from airmoe.errors import ConfigError
from airmoe.files import read_json, write_json
from airmoe.training.checkpoints import load_json
from airmoe.training.config import RunConfig

FORMAT = 1
PACKAGES = ("airmoe", "transformers", "accelerate", "safetensors", "tokenizers", "numpy")


@dataclass(frozen=True)
class RunFolder:
    """An existing run folder and the settings in it."""

    path: Path
    config: RunConfig

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def test(self) -> Path:
        return self.path / "test.json"


def create_run(path: Path, config: RunConfig, prepared: Prepared) -> RunFolder:
    """Make the folder of a new run; one that exists is never overwritten."""
    check_free(path, config)
    path.mkdir(parents=True, exist_ok=True)
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
        },
    )
    return RunFolder(path, config)


def check_free(path: Path, config: RunConfig) -> None:
    """Raise unless a new run may be made there."""
    # A link that leads nowhere does not exist, but no folder can be made in its place.
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
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
    if found != FORMAT:
        raise ConfigError(
            "run.format",
            found,
            f"must be {FORMAT}, the format of this airmoe",
            "Use the airmoe version that wrote it (see versions in run.json).",
        )
    return RunFolder(path, RunConfig.from_json(config))


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
    former = _digest(asdict(prepared.manifest))  # what older runs noted
    found = read_json(run.path / "run.json").get("data_sha256")
    if found not in (data_sha256(prepared), former):
        raise ConfigError(
            "data.folder",
            str(prepared.folder),
            f"must hold the text with which {run.path} began",
            "Put that back, or start a new run.",
        )


def check_log(run: RunFolder, checkpoint: Path) -> None:
    """Raise if the log lost lines from before the checkpoint: they cannot be made again."""
    length = load_json(checkpoint / "training.json")["log_bytes"]
    found = run.log.stat().st_size if run.log.is_file() else 0
    if found < length:
        raise ConfigError(
            "log",
            str(run.log),
            f"must have at least the {length} bytes it had at {checkpoint.name}, not {found}",
            "Put the file back, or start a new run.",
        )


def check_never_saved(run: RunFolder, first_checkpoint: int) -> None:
    """Raise if a run without checkpoints had one: its log goes on after the first was due.

    Before that only a signal makes one. Should that be gone, the same few steps are done again.
    """
    reached = _last_logged_step(run.log)
    if reached > first_checkpoint:
        raise ConfigError(
            "run",
            str(run.path),
            f"must hold the checkpoints it had: its log reaches step {reached}, and it wrote a "
            f"checkpoint after step {first_checkpoint}",
            "Put its newest checkpoint-N folder back, or start a new run in another folder.",
        )


def _last_logged_step(log: Path) -> int:
    """0 without a line; a last one that a kill tore is none."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.is_file() else []
    return json.loads(lines[-1])["step"] if lines else 0


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Keep others out of a run that goes on; a lock of the system, so none outlives a kill."""
    with (run.path / "run.json").open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                "run",
                str(run.path),
                "is being trained by another process at this moment",
                "Wait for it, or stop it first.",
            ) from error
        yield


def versions() -> dict[str, str]:
    """Python and the packages that decide what a run computes."""
    # torch with its build, which metadata may lack.
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
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
