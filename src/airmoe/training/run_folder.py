"""A run's folder: made and locked with run.json at the start, summed up in result.json at the end.

RUN/  run.json         settings, hash and recipe of the text, versions, git state, machine, and
                       which convention its balance loss has
      lock             which process trains it, while one does
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
import resource
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from airmoe import __version__
from airmoe.data import Prepared
from airmoe.errors import ConfigError
from airmoe.files import LOCK, check_unlocked, locked, read_json, write_bytes, write_json
from airmoe.losses import BALANCE
from airmoe.model import parameter_counts
from airmoe.training.checkpoints import (
    FORMAT,
    LOG,
    USAGE,
    check_format,
    checked_fields,
    checkpoints,
    load_json,
    step_of,
)
from airmoe.training.config import RunConfig
from airmoe.training.run_log import read_log

TRAINED = "is being trained"
UNUSED = (LOCK, "run.json.draft")  # what a kill leaves before there is a run
NUMBER = (int, float)
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
        """One hash of settings and text: which run a checkpoint belongs to.

        Taken from run.json, so that an option which a later version adds does not change it.
        """
        values = read_json(self.path / "run.json")
        settings = {name: value for name, value in values["config"].items() if name != "preset"}
        return _digest({"config": settings, "data_sha256": values.get("data_sha256")})

    def lock(self) -> AbstractContextManager[None]:
        """Keep others out of a run that goes on."""
        return locked(self.path, "run", TRAINED)


@contextmanager
def claimed(path: Path, config: RunConfig) -> Iterator[None]:
    """Make and lock the folder of a new run.

    If it fails before the first line of its log, the folder is removed again: the corrected command
    needs the place.
    """
    check_free(path, config)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    with locked(path, "run", TRAINED):
        unused = UNUSED
        try:
            check_free(path, config)  # again, now that no other process can make one
            yield
        except BaseException:
            unused = (*UNUSED, "run.json")
            raise
        finally:
            if {*os.listdir(path)} <= {*unused}:
                for name in unused:
                    (path / name).unlink(missing_ok=True)
                with suppress(OSError):  # a parent that is no longer empty
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
        raise _occupied(path, config)


def _occupied(path: Path, config: RunConfig) -> ConfigError:
    resume = f"airmoe train --resume {path}"
    try:
        if open_run(path).config == config:
            rule, remedy = "holds this very run already", f"Go on with it: {resume}"
        else:
            rule = "holds a run with another config"
            remedy = f"Choose another folder with --run, or go on with that run: {resume}"
    except ConfigError:
        rule, remedy = "must be a new or empty folder", "Choose another with --run."
    return ConfigError("run", str(path), rule, remedy)


def open_run(path: Path) -> RunFolder:
    """Read the folder of an earlier run."""
    file = path / "run.json"
    if not file.is_file():
        rule = "must be a run folder with a run.json"
        raise ConfigError("run", str(path), rule, "Give the folder of a run.")
    try:
        values = read_json(file)
        found, config = values["format"], values["config"]
    except (ValueError, KeyError, TypeError) as error:
        rule = f"must be JSON with format and config ({error})"
        raise ConfigError("run", str(file), rule, "Start a new run.") from error
    check_format("run.format", found)
    return RunFolder(path, RunConfig.from_json(config))


def write_result(run: RunFolder, peak_memory: float | None) -> None:
    """Sum up a finished run in one small file, from its log.

    `peak_memory` is None where no step was trained just now: then the earlier result or run.json
    knows machine and versions.
    """
    lines = read_log(run.log)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    newest = checkpoints(run.path)[-1]
    if not evaluations or evaluations[-1]["step"] != step_of(newest):
        raise ConfigError(
            "log",
            str(run.log),
            f"must have the evaluation of step {step_of(newest)}, the last one",
            f"Remove {newest} and resume the run: its last steps are done again.",
        )
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    started = read_json(run.path / "run.json")
    if peak_memory is None:
        before = read_result(run.result) if run.result.exists() else started
        conditions = {name: before.get(name) for name in ("peak_memory_gib", "versions", "machine")}
    else:
        conditions = {"peak_memory_gib": peak_memory, "versions": versions(), "machine": machine()}
    best = min(evaluations, key=lambda line: line["loss"])
    usage = run.path / f"checkpoint-{best['step']}" / USAGE
    if usage.exists():
        write_bytes(run.path / USAGE, usage.read_bytes())
    model = load_json(newest / "config.json")
    counts = parameter_counts(run.config.model_config(model["vocab_size"], model["eos_token_id"]))
    write_json(
        run.result,
        {
            "config": run.config.to_json(),
            "parameters": {"total": counts.total, "active": counts.active},
            "best": best,
            "last": evaluations[-1],
            "test": read_test(run.test) if run.test.exists() else None,
            "tokens": evaluations[-1]["tokens"],
            "seconds": evaluations[-1]["seconds"],
            "tokens_per_second": median(speeds) if speeds else None,
            **conditions,
            "git": started["git"],
            "log": lines,
        },
    )


def read_result(file: Path) -> dict[str, Any]:
    """A result.json, with the fields that we read."""
    again = f"Remove the file and resume the run: airmoe train --resume {file.parent}"
    values = load_json(file, again)
    kinds = {"best": dict, "last": dict, "seconds": NUMBER}
    checked_fields(file, values, kinds | {"tokens_per_second": (*NUMBER, type(None))}, again)
    best = {"loss": NUMBER, "perplexity": NUMBER}
    checked_fields(file, values["best"], best, again, "best")
    checked_fields(file, values["last"], {"step": int}, again, "last")
    return values


def read_test(file: Path) -> dict[str, Any]:
    """A test.json, with the fields that we read."""
    again = "Remove the file and resume the run: the test split is measured again."
    kinds = {"step": int, "tokens": int, "loss": NUMBER, "perplexity": NUMBER}
    return checked_fields(file, load_json(file, again), kinds, again)


def data_sha256(prepared: Prepared) -> str:
    """One hash of a run's tokens, whatever the text's folders and files are called."""
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
    # Copied into the result at the end.
    kinds = {"versions": dict, "git": dict, "machine": dict}
    checked_fields(file, values, kinds, "Put the file back as it was, or start a new run.")


def versions() -> dict[str, str]:
    """Python and the packages that decide what a run computes."""
    found = {"airmoe": __version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)  # with its build, which metadata may lack
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_state() -> dict[str, Any]:
    """Commit of the code that runs, and whether it was changed since; None outside a checkout.

    The environment variable AIRMOE_COMMIT names the commit of a copy without its own repository.
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


def peak_memory() -> float:
    """GiB: of the GPU's allocator where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used * (1 if os.uname().sysname == "Darwin" else 1024) / 2**30
