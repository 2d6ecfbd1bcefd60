"""Training runs: one loop on Accelerate, exact resume, DDP and FSDP2, routing health."""

from __future__ import annotations

from airmoe.training.checkpoints import best_checkpoint
from airmoe.training.config import (
    MODEL_OPTIONS,
    DataOptions,
    RunConfig,
    TrainingOptions,
    model_options,
    override,
)
from airmoe.training.evaluation import Evaluation, evaluate
from airmoe.training.presets import PRESETS, method_run, preset
from airmoe.training.run import Finished, resume, train
from airmoe.training.run_folder import RunFolder, open_run
from airmoe.training.trained import generate_text

__all__ = [
    "MODEL_OPTIONS",
    "PRESETS",
    "DataOptions",
    "Evaluation",
    "Finished",
    "RunConfig",
    "RunFolder",
    "TrainingOptions",
    "best_checkpoint",
    "evaluate",
    "generate_text",
    "method_run",
    "model_options",
    "open_run",
    "override",
    "preset",
    "resume",
    "train",
]
