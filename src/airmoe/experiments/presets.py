"""Named runs: `tiny` for a laptop, and the paper's runs with its exact settings."""

from __future__ import annotations

from typing import Any

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError
from airmoe.model import model_size, with_method
from airmoe.model.methods import check_method
from airmoe.training import DataOptions, RunConfig, TrainingOptions, model_options

# Steps of the paper's runs on the two web corpora: the FLOPs of AIR in its main table by those of a
# step, to the nearest hundred. Medium and large are known to two or three digits.
WEB_STEPS = {
    "small-c5": 28_500,
    "small-openwebtext2": 23_000,
    "medium-c5": 61_900,
    "medium-openwebtext2": 54_400,
    "large-c5": 62_000,
    "large-openwebtext2": 48_600,
}
# The paper trains no large model on WikiText-103: `large` means its OpenWebText2 run.
PRESETS = ("tiny", "small", "medium", "large", *WEB_STEPS)


def preset(name: str, method: str = "air") -> RunConfig:
    """The settings of a named run with one of the methods.

    `small` and `medium` are the paper's WikiText-103 runs.
    """
    if name not in PRESETS:
        remedy = f"{did_you_mean(name, PRESETS)}Choose one of these."
        raise ConfigError("preset", name, f"must be one of {', '.join(PRESETS)}", remedy)
    check_method("method", method)
    size = name.partition("-")[0]
    data, training = _recipe("large-openwebtext2" if name == "large" else name, size)
    return RunConfig(
        preset=name,
        model=model_options(with_method(model_size(size), method)),
        data=DataOptions(**data),
        training=TrainingOptions(**training),
    )


def _recipe(name: str, size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of data and training; what is not named here is the same in all the paper's runs."""
    if name == "tiny":
        data = {"corpus": "python-docs", "tokenizer": "bpe:2048", "block_size": 128}
        # Small batches and a high rate: most learning for a minute of two CPU cores.
        return data | {"validation_fraction": 0.05}, {
            "batch_size": 4,
            "micro_batch_size": 4,
            "steps": 360,
            "learning_rate": 2e-3,
            "eval_every": 60,
            "eval_blocks": 64,
            "log_every": 30,
        }
    if name not in WEB_STEPS:
        data = {"corpus": "wikitext103", "tokenizer": "llama-3", "block_size": 256}
        return data, {
            "batch_size": 64,  # 16 sequences on each of 4 devices
            "micro_batch_size": 16,
            "epochs": 10,
            "precision": "fp16",
        }
    corpus = name.partition("-")[2]
    data = {"corpus": corpus, "tokenizer": "llama-3", "block_size": 1024}
    return data, {
        "batch_size": 128 if size == "large" else 64,
        "micro_batch_size": 8,
        "steps": WEB_STEPS[name],
        "eval_every": 500,
        "precision": "fp16",
    }
