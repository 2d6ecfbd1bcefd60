"""Named runs, each with any method at an equal budget: `tiny` for a laptop, and the paper's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from airmoe.config import did_you_mean
from airmoe.errors import ConfigError
from airmoe.files import parse_json
from airmoe.model import AirMoeConfig, model_size, with_method
from airmoe.model.methods import check_method
from airmoe.routers import AirRouter
from airmoe.training.config import (
    DataOptions,
    RunConfig,
    TrainingOptions,
    model_options,
    override,
)

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

ROUTER_OPTIONS = "model.router_options"
# AIR's expert choice has `capacity_factor` too, but where it is given it means the method's own.
AIR_OPTIONS = {field.name for field in dataclasses.fields(AirRouter.Config)} - {"capacity_factor"}


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
    """Options of data and training; the defaults of all others are the paper's."""
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
            "epochs": 10,
        }
    corpus = name.partition("-")[2]
    data = {"corpus": corpus, "tokenizer": "llama-3", "block_size": 1024}
    return data, {
        "batch_size": 128 if size == "large" else 64,
        "steps": WEB_STEPS[name],
        "eval_every": 500,
    }


def method_run(name: str, method: str, assignments: Sequence[str] = ()) -> RunConfig:
    """A named run with a method and your own settings (`section.option=value`).

    They set up the run with AIR, from which the method is made, so that equal settings are an equal
    budget for every method. Only options that AIR lacks go to the method's own router.
    """
    check_method("method", method)
    if method == "air":
        return override(preset(name), assignments)
    for_air, own = _divided(assignments)
    try:
        base = override(preset(name), for_air)
    except ConfigError as error:
        # The preset's shortlists may not fit other sizes. Only clusters are made from them; for
        # other methods shortlists derived from the sizes will do.
        if method == "hierarchical" or error.field != f"{ROUTER_OPTIONS}.shortlist_size":
            raise
        base = override(preset(name), [f"{ROUTER_OPTIONS}={{}}", *for_air])
    return override(method_variant(base, method), own)


def method_variant(base: RunConfig, method: str) -> RunConfig:
    """The run with AIR, routed in another way."""
    return with_model(base, with_method(air_model(base), method))


def air_model(base: RunConfig) -> AirMoeConfig:
    """The model of a run that must have AIR."""
    model = base.model_config(vocab_size=2, eos_id=1)  # any vocabulary: it is not kept
    if model.router != "air":
        rule = "must be 'air', because the other methods are made from it"
        raise ConfigError("model.router", model.router, rule, "Leave it out.")
    return model


def with_model(base: RunConfig, model: AirMoeConfig) -> RunConfig:
    """The run with another model; a vocabulary that was asked for stays."""
    options = model_options(model)
    if "vocab_size" in base.model:
        options["vocab_size"] = base.model["vocab_size"]
    return dataclasses.replace(base, model=options)


def _divided(assignments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Assignments for the run with AIR, and those for the method's own router."""
    for_air: list[str] = []
    own: list[str] = []
    replaced = False  # all options at once by the method's own; later assignments change these
    for assignment in assignments:
        path, _, text = assignment.partition("=")
        is_own = False
        if path == ROUTER_OPTIONS:
            is_own = replaced = not _are_air_options(text)
        elif path.startswith(f"{ROUTER_OPTIONS}."):
            is_own = replaced or path.removeprefix(f"{ROUTER_OPTIONS}.") not in AIR_OPTIONS
        (own if is_own else for_air).append(assignment)
    return for_air, own


def _are_air_options(text: str) -> bool:
    try:
        given = parse_json(text)
    except ValueError:
        return True  # `override` refuses it
    return not isinstance(given, dict) or given.keys() <= AIR_OPTIONS
