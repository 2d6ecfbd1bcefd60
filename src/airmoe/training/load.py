"""A trained model out of a run folder, with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from airmoe.config import check_choice
from airmoe.data import Prepared, Tokenizer, load_tokenizer
from airmoe.errors import ConfigError
from airmoe.model import AirMoeForCausalLM
from airmoe.training.checkpoints import best_checkpoint, check_checkpoint, checkpoints
from airmoe.training.run_folder import RunFolder, open_run

Which = Literal["best", "last"]


@dataclass(frozen=True)
class Trained:
    """What is needed to use a run's model."""

    run: RunFolder
    checkpoint: Path
    model: AirMoeForCausalLM
    tokenizer: Tokenizer


def load_trained(folder: Path, which: Which = "best") -> Trained:
    """The best (by validation loss) or the last checkpoint of a run, ready to evaluate."""
    check_choice("checkpoint", which, Which)
    run = open_run(folder)
    checkpoint = best_checkpoint(folder)
    if which == "last":
        checkpoint = checkpoints(folder)[-1]
    check_checkpoint(checkpoint, run.sha256(), to_resume=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers_logging.disable_progress_bar()
    try:
        model = AirMoeForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, SafetensorError, RuntimeError, TypeError, OverflowError) as error:
        raise ConfigError(
            "checkpoint",
            str(checkpoint),
            f"must be whole ({str(error).splitlines()[0].rstrip('.')})",
            "Take another one, or remove its folder and resume the run.",
        ) from error
    model.to(device)  # pyright: ignore[reportArgumentType]
    return Trained(run, checkpoint, model.eval(), load_tokenizer(checkpoint))


def check_same_tokenizer(tokenizer: Tokenizer, prepared: Prepared) -> None:
    """A model reads only tokens of the tokenizer it was trained with."""
    ours, theirs = tokenizer.identity, prepared.manifest.tokenizer
    if ours != theirs:
        raise ConfigError(
            "data.tokenizer",
            f"{theirs.kind} ({theirs.vocab_size:,} ids, {theirs.sha256[:12]})",
            f"must be the model's, {ours.kind} ({ours.vocab_size:,} ids, {ours.sha256[:12]})",
            "Prepare this text again with the tokenizer the model was trained with.",
        )
