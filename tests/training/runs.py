"""Small real runs for the tests of training: a text, settings, and a process that may be killed."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from airmoe.data import PrepareConfig, prepare
from airmoe.model import AirMoeConfig
from airmoe.training import DataOptions, RunConfig, TrainingOptions, resume, train
from airmoe.training.callbacks import Recorder
from airmoe.training.config import model_options
from airmoe.training.run import read_log

WORDS = "the of a expert router token learns codebook follows shortlist picks and then again".split()


def write_text(folder: Path, documents: int = 240) -> Path:
    """Sentences with some structure, different in every document."""
    random = torch.Generator().manual_seed(7)
    texts = []
    for _ in range(documents):
        chosen = torch.randint(len(WORDS), (40,), generator=random).tolist()
        texts.append(" ".join(WORDS[index] for index in chosen) + ".")
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
                "router_options": {"num_codewords": 8, "shortlist_size": 16},
                **fields,
            }
        )
    )


def small_run(folder: Path, model: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    """A run of some seconds: 12 steps in windows of 2 micro-batches."""
    text, tokens = folder / "text.txt", folder / "tokens"
    if not text.exists():
        write_text(folder)
        prepare(
            PrepareConfig(
                corpus=str(text),
                tokenizer="bytes",
                out=str(tokens),
                validation_fraction=0.1,
                workers=1,
            )
        )
    return RunConfig(
        preset="test",
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
                "tensorboard": False,
                **training,
            }
        ),
    )


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"))  # noqa: SIM115 (as long as the console)


def in_process(job: Callable[[], Any]) -> int:
    """Run `job` in a process of its own and return how it ended: 0, or minus the signal.

    Forked, not started: importing torch and transformers again would take most of the test.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


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
        {name: value for name, value in line.items() if name not in Recorder.TIME_FIELDS}
        for line in read_log(folder / "log.jsonl")
    ]
