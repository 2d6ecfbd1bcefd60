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

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import torch

from airmoe import __version__
from airmoe.data import Prepared
from airmoe.errors import ConfigError
from airmoe.files import (
    LOCK,
    check_unlocked,
    json_sha256,
    locked,
    read_as,
    write_bytes,
    write_json,
)
from airmoe.losses import BALANCE_CONVENTION
from airmoe.model import AirMoeConfig, parameter_counts
from airmoe.training.checkpoints import FORMAT, LOG, USAGE, check_format
from airmoe.training.config import RunConfig
from airmoe.training.run_log import Evaluated, read_log

TRAINED = "is being trained"
UNUSED = (LOCK, "run.json.draft")  # what remains of a run that was killed before it began
PACKAGES = ("transformers", "accelerate", "safetensors", "tokenizers", "numpy")


class Started(TypedDict):
    """What run.json holds, as far as we read it."""

    format: int
    config: dict[str, Any]
    data_sha256: str
    versions: dict[str, str]
    git: dict[str, Any]
    machine: dict[str, Any]


class Tested(TypedDict):
    """What test.json holds."""

    step: int
    tokens: int
    loss: float
    perplexity: float


class Result(TypedDict):
    """What result.json holds, as far as we read it."""

    best: Evaluated
    last: Evaluated
    seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class RunFolder:
    """An existing run folder and the settings in it."""

    path: Path
    config: RunConfig
    started: Started

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
        settings = {**self.started["config"]}
        del settings["preset"]
        return json_sha256({"config": settings, "data_sha256": self.started["data_sha256"]})

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
    path.mkdir(parents=True, exist_ok=True)
    with locked(path, "run", TRAINED):
        check_free(path, config)  # again, now that no other process can make one
        try:
            yield
        finally:
            if not (path / LOG).exists():
                shutil.rmtree(path, ignore_errors=True)


def create_run(path: Path, config: RunConfig, prepared: Prepared) -> RunFolder:
    """Write what a new run is into its claimed folder."""
    started: Started = {
        "format": FORMAT,
        "config": config.to_json(),
        "data_sha256": data_sha256(prepared),
        "versions": versions(),
        "git": git_state(),
        "machine": machine(),
    }
    more = {"data_recipe": asdict(prepared.manifest.recipe), "balance": BALANCE_CONVENTION}
    write_json(path / "run.json", {**started, **more})
    return RunFolder(path, config, started)


def check_free(path: Path, config: RunConfig) -> None:
    """Raise unless a new run may be made there."""
    # A link that leads nowhere does not exist, but no folder can be made in its place.
    if os.path.lexists(path) and not (path.is_dir() and {*os.listdir(path)} <= {*UNUSED}):
        check_unlocked(path, "run", TRAINED)
        resume = f"airmoe train --resume {path}"
        try:
            if open_run(path).config == config:
                rule, remedy = "holds this very run already", f"Go on with it: {resume}"
            else:
                rule = "holds a run with another config"
                remedy = f"Choose another folder with --run, or go on with that run: {resume}"
        except ConfigError:
            rule, remedy = "must be a new or empty folder", "Choose another with --run."
        raise ConfigError("run", str(path), rule, remedy)


def open_run(path: Path) -> RunFolder:
    """Read the folder of an earlier run."""
    file = path / "run.json"
    if not file.is_file():
        rule = "must be a run folder with a run.json"
        raise ConfigError("run", str(path), rule, "Give the folder of a run.")
    remedy = "Put it back as it was, or start a new run."
    started = read_as(Started, file, remedy, check=lambda values: check_format(file, values))
    return RunFolder(path, RunConfig.from_json(started["config"]), started)


def write_result(run: RunFolder, model: AirMoeConfig, peak_memory: float | None) -> None:
    """Sum up a finished run in one small file, from its log.

    `peak_memory` is None where no step was trained just now: then run.json knows the machine.
    """
    lines = read_log(run.log)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    best, last = min(evaluations, key=lambda line: line["loss"]), evaluations[-1]
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    usage = run.path / f"checkpoint-{best['step']}" / USAGE
    if usage.exists():
        write_bytes(run.path / USAGE, usage.read_bytes())
    counts, started = parameter_counts(model), run.started
    here = started if peak_memory is None else {"versions": versions(), "machine": machine()}
    write_json(
        run.result,
        {
            "config": run.config.to_json(),
            "parameters": {"total": counts.total, "active": counts.active},
            "best": best,
            "last": last,
            "test": read_test(run.test) if run.test.exists() else None,
            "tokens": last["tokens"],
            "seconds": last["seconds"],
            "tokens_per_second": median(speeds) if speeds else None,
            "peak_memory_gib": peak_memory,
            "versions": here["versions"],
            "machine": here["machine"],
            "git": started["git"],
            "log": lines,
        },
    )


def read_result(file: Path) -> Result:
    remedy = f"Remove it and resume the run: airmoe train --resume {file.parent}"
    return read_as(Result, file, remedy)


def read_test(file: Path) -> Tested:
    return read_as(Tested, file, "Remove it and resume the run: the test split is measured again.")


def data_sha256(prepared: Prepared) -> str:
    """One hash of a run's tokens, whatever the text's folders and files are called."""
    manifest = prepared.manifest
    shards = {
        name: [shard.sha256 for shard in split.shards] for name, split in manifest.splits.items()
    }
    return json_sha256({"tokenizer": manifest.tokenizer.sha256, "shards": shards})


def check_same_data(run: RunFolder, prepared: Prepared) -> None:
    """Raise if the text changed since the run began: it would go on as another run."""
    if run.started["data_sha256"] != data_sha256(prepared):
        rule = f"must hold the text with which {run.path} began"
        remedy = "Put that back, or start a new run."
        raise ConfigError("data.folder", str(prepared.folder), rule, remedy)


def versions() -> dict[str, str]:
    """Python and the packages that decide what a run computes."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    torch_build = str(torch.__version__)  # which metadata may lack
    python = platform.python_version()
    return {"airmoe": __version__, "python": python, "torch": torch_build, **packages}


def git_state() -> dict[str, Any]:
    """Commit of the code that runs, and whether it was changed since; None outside a checkout.

    The environment variable AIRMOE_COMMIT names the commit of a copy without its own repository.
    """
    if told := os.environ.get("AIRMOE_COMMIT"):
        return {"commit": told, "changed": None}
    root = Path(__file__).parents[3]
    # An installed package may lie inside somebody else's checkout.
    if not (root / ".git").exists() or shutil.which("git") is None:
        return {"commit": None, "changed": None}
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "changed": bool(_git(root, "status", "--porcelain")),
    }


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
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
