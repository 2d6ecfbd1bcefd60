"""Small real runs for the tests of training: a text, settings, and a process that may be killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from airmoe.data import PrepareConfig, open_prepared, prepare
from airmoe.files import read_json
from airmoe.model import AirMoeConfig
from airmoe.routers import track_optimizer
from airmoe.training import DataOptions, RunConfig, TrainingOptions, resume, train
from airmoe.training.checkpoints import LOG, checkpoints
from airmoe.training.config import model_options
from airmoe.training.run import build_model
from airmoe.training.run_log import TIME_FIELDS, read_log
from airmoe.training.text import epoch_order

OPTIONS = {"num_codewords": 8, "shortlist_size": 16}
WORDS = "the of a expert router token learns codebook follows shortlist picks and then again"


def write_text(folder: Path, documents: int = 240) -> Path:
    """Sentences with some structure, different in every document."""
    random, words = torch.Generator().manual_seed(7), WORDS.split()
    texts = []
    for _ in range(documents):
        chosen = torch.randint(len(words), (40,), generator=random).tolist()
        texts.append(" ".join(words[index] for index in chosen) + ".")
    path = folder / "text.txt"
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return path


def small_model(**fields: Any) -> dict[str, Any]:
    return model_options(
        AirMoeConfig(
            **{
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_experts": 64,
                "num_experts_per_tok": 4,
                "router_options": OPTIONS,
                **fields,
            }
        )
    )


def small_run(
    folder: Path, model: dict[str, Any] | None = None, *, documents: int = 240, **training: Any
) -> RunConfig:
    """A run of a second: 12 steps in windows of 2 micro-batches.

    240 documents make an epoch of some 200 steps, 16 one of some 13.
    """
    text, tokens = folder / "text.txt", folder / "tokens"
    if not text.exists():
        write_text(folder, documents)
        prepare(
            PrepareConfig(
                corpus=str(text),
                tokenizer="bytes",
                out=str(tokens),
                validation_fraction=0.1,
            )
        )
    return RunConfig(
        preset="tiny",
        model=small_model() if model is None else model,
        data=DataOptions(
            corpus=str(text),
            tokenizer="bytes",
            block_size=32,
            folder=str(tokens),
        ),
        training=TrainingOptions(
            **{
                "batch_size": 8,
                "micro_batch_size": 4,
                "steps": 12,
                "eval_every": 4,
                "eval_blocks": 9,
                "log_every": 3,
                "learning_rate": 1e-2,
                "quality_tokens": 16,
                "precision": "fp32",
                "compile": False,
                "cuda_graph": False,
                "track": "none",
                **training,
            }
        ),
    )


def assignments(config: RunConfig) -> list[str]:
    """The overrides that make these settings out of any preset."""
    values = config.to_json()
    return [
        f"{section}.{name}={json.dumps(value)}"
        for section in ("model", "data", "training")
        for name, value in values[section].items()
    ]


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))


def in_process(job: Callable[[], Any]) -> int:
    """Run `job` in a process of its own and return how it ended: 0, or minus the signal.

    Forked, not started: importing torch and transformers again would take most of the test.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        gc.freeze()  # the Trainer collects garbage, and everything the tests imported is not
        try:
            job()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@dataclass(frozen=True)
class Whole:
    """A run that was never killed, to compare with."""

    config: RunConfig
    path: Path


def trained(config: RunConfig, folder: Path, *patches: Callable[[], None]) -> Path:
    """A finished run, made in a process of its own with these patches."""

    def job() -> None:
        for patch in patches:
            patch()
        train_here(config, folder)

    assert in_process(job) == 0
    return folder


def killed(config: RunConfig, folder: Path, kill: Callable[[], None]) -> Path:
    """A run that did not survive: `kill` comes from kills.py."""

    def job() -> None:
        kill()
        train_here(config, folder)

    assert in_process(job) == -signal.SIGKILL
    return folder


def resumed(folder: Path, kill: Callable[[], None] | None = None) -> Path:
    """The run after a resume, which `kill` may have ended early."""

    def job() -> None:
        if kill is not None:
            kill()
        resume_here(folder)

    assert in_process(job) == (0 if kill is None else -signal.SIGKILL)
    return folder


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_here(config: RunConfig, folder: Path) -> None:
    torch.set_num_threads(1)
    train(config, folder, quiet())


def resume_here(folder: Path) -> None:
    torch.set_num_threads(1)
    resume(folder, quiet())


def timeless_log(folder: Path) -> list[dict[str, Any]]:
    """The log without the fields in which two equal runs may differ."""
    return [
        {name: value for name, value in line.items() if name not in TIME_FIELDS}
        for line in read_log(folder / "log.jsonl")
    ]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """`file/name` -> tensor, of every safetensors file of a checkpoint."""
    return {
        f"{file.name}/{name}": tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def timeless_files(checkpoint: Path) -> dict[str, Any]:
    """The other files of a checkpoint, without the numbers that depend on the clock."""
    files: dict[str, Any] = {}
    for file in sorted(checkpoint.iterdir()):
        if file.suffix == ".json":
            files[file.name] = read_json(file)
        elif file.suffix != ".safetensors":
            files[file.name] = file.read_bytes()
    for name in ("seconds", "training_seconds"):
        del files["training.json"][name]
    for name in ("training.json", LOG):
        del files["manifest.json"]["files"][name]
    return files | {LOG: timeless_log(checkpoint)}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names that are missing in one of them, or whose tensors are not equal bit for bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or one[name].dtype != other[name].dtype
        or not torch.equal(one[name], other[name])
    ]


def assert_same_run(run: Path, reference: Path) -> None:
    """Equal to the bit in everything but the clock: checkpoints, log, and no leftovers."""
    assert sorted(path.name for path in run.iterdir()) == sorted(
        path.name for path in reference.iterdir()
    )
    for ours, theirs in zip(checkpoints(run), checkpoints(reference), strict=True):
        assert differing(tensors_of(ours), tensors_of(theirs)) == [], ours.name
        assert timeless_files(ours) == timeless_files(theirs), ours.name
    assert timeless_log(run) == timeless_log(reference)
    results = [read_json(folder / "result.json") for folder in (run, reference)]
    for result in results:
        for line in (result, result["best"], result["last"], *result["log"]):
            for name in (*TIME_FIELDS, "peak_memory_gib"):
                line.pop(name, None)
    assert results[0] == results[1]


def loss_of_a_new_model(config: RunConfig, micro_batches: int = 2) -> float:
    """On the first blocks of its order, micro-batch by micro-batch."""
    assert config.data.folder is not None
    prepared = open_prepared(Path(config.data.folder))
    blocks = prepared.blocks("train", config.data.block_size)
    size, seed = config.training.batch_size, config.training.seed
    order = epoch_order(len(blocks), size, seed, epoch=0)[:size]
    model = build_model(config, prepared).train()
    optimizer = torch.optim.SGD(model.parameters())  # kept: a dead one would not be tracked
    track_optimizer(model, optimizer)
    input_ids = torch.stack([blocks[place]["input_ids"] for place in order])
    losses = [
        model(input_ids=ids, labels=ids).loss.item() for ids in input_ids.chunk(micro_batches)
    ]
    return sum(losses) / micro_batches
