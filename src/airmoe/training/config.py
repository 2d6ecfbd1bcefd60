"""The settings of a training run: model, data, recipe. Checked, saved as JSON, overridable."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from huggingface_hub.errors import StrictDataclassError

from airmoe.config import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_text,
    config,
    did_you_mean,
    unknown_option,
)
from airmoe.errors import ConfigError
from airmoe.files import parse_json
from airmoe.flops import Workload
from airmoe.model import AirMoeConfig
from airmoe.model.configuration import refused

Auto = Literal["auto"]  # what this machine supports: devices.py
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Sharding = Literal["none", "fsdp2"]
Tracker = Literal[  # as Accelerate calls them
    "tensorboard",
    "wandb",
    "mlflow",
    "comet_ml",
    "aim",
    "clearml",
    "dvclive",
    "swanlab",
    "trackio",
    "none",
]

COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
ROUTING_OPTIONS = (
    "router",
    "router_options",
    "experts",
    "num_experts",
    "num_experts_per_tok",
    "expert_size",
)
# The options of AirMoeConfig that a run may set; what it inherits besides would be a mistake here.
MODEL_OPTIONS = (
    *COUNTS,
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    *ROUTING_OPTIONS,
    "expert_activation",
    "moe_layers",
    "moe_post_norm",
    "moe_post_norm_gain",
    "load_balance_weight",
    "shortlist_balance_weight",
    "router_z_weight",
)


@config
class DataOptions:
    """Which text, and how it is cut into blocks."""

    label: ClassVar[str] = "data"

    corpus: str
    tokenizer: str
    block_size: int
    folder: str | None = None  # prepared tokens; None: data/<corpus>-<tokenizer>
    validation: str | None = None
    validation_fraction: float = 0.005
    max_tokens: int | None = None

    def check(self) -> None:
        for name in ("corpus", "tokenizer", "folder", "validation"):
            value, optional = getattr(self, name), name in ("folder", "validation")
            if not (value is None and optional):
                check_text(f"data.{name}", value)
        check_count("data.block_size", self.block_size, least=2)
        check_number("data.validation_fraction", self.validation_fraction, below=1.0)
        if self.max_tokens is not None:
            check_count("data.max_tokens", self.max_tokens)


@config
class TrainingOptions:
    """How to train; the defaults are the paper's."""

    label: ClassVar[str] = "training"

    batch_size: int  # sequences per optimizer step, over all devices and micro-batches
    micro_batch_size: int | Auto = "auto"  # sequences per device and forward
    epochs: int | None = None  # one of epochs and steps
    steps: int | None = None
    learning_rate: float = 3e-4
    warmup: float = 0.05  # share of all steps
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: Precision = "auto"
    seed: int = 42
    eval_every: int | Literal["epoch"] = "epoch"  # steps; a checkpoint follows each evaluation
    eval_blocks: int | None = None  # validate on the first so many blocks; None: all
    log_every: int = 500
    save_every: int | None = None  # more checkpoints between evaluations
    keep_checkpoints: int = 2  # the best one and the newest count among them
    quality_tokens: int = 512  # sample for overlap and mass recall at every log
    gradient_checkpointing: bool = False
    compile: bool | Auto = "auto"
    cuda_graph: bool | Auto = "auto"  # of whole micro-batches, on one GPU
    sharding: Sharding = "none"  # of several processes: none is DDP
    track: Tracker = "tensorboard"  # where else log lines go; log.jsonl has them in any case

    def check(self) -> None:
        for name in ("batch_size", "log_every", "quality_tokens"):
            check_count(f"training.{name}", getattr(self, name))
        if self.micro_batch_size != "auto":
            check_count("training.micro_batch_size", self.micro_batch_size)
        check_count("training.keep_checkpoints", self.keep_checkpoints, least=2)
        check_count("training.seed", self.seed, least=0)
        check_number("training.seed", self.seed, below=2**32)  # numpy takes no larger one
        for name in ("epochs", "steps", "eval_blocks", "save_every"):
            if getattr(self, name) is not None:
                check_count(f"training.{name}", getattr(self, name))
        if self.eval_every != "epoch":
            check_count("training.eval_every", self.eval_every)
        check_number("training.learning_rate", self.learning_rate, strict=True)
        check_number("training.epsilon", self.epsilon, strict=True)
        check_number("training.max_grad_norm", self.max_grad_norm, strict=True)
        check_number("training.weight_decay", self.weight_decay)
        for name in ("warmup", "beta1", "beta2"):
            check_number(f"training.{name}", getattr(self, name), below=1.0)
        check_flag("training.gradient_checkpointing", self.gradient_checkpointing)
        for name in ("compile", "cuda_graph"):
            if getattr(self, name) != "auto":
                check_flag(f"training.{name}", getattr(self, name))
        check_choice("training.precision", self.precision, Precision)
        check_choice("training.sharding", self.sharding, Sharding)
        check_choice("training.track", self.track, Tracker)
        self._check_length()

    def _check_length(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            rule = f"must be given exactly when epochs is not (epochs = {self.epochs})"
            remedy = "Set one of training.steps and training.epochs, and the other to null."
            raise ConfigError("training.steps", self.steps, rule, remedy)
        if self.micro_batch_size != "auto" and self.batch_size % self.micro_batch_size:
            rule = f"must divide batch_size = {self.batch_size}"
            remedy = "Choose a divisor; gradient accumulation makes up the rest."
            raise ConfigError("training.micro_batch_size", self.micro_batch_size, rule, remedy)

    @property
    def sequences(self) -> int:
        """The sequences of a micro-batch, once `auto` has been replaced by a number."""
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size

    def accumulation_steps(self, num_processes: int) -> int:
        """Micro-batches per optimizer step on each of `num_processes`; with "auto", one."""
        size = 1 if self.micro_batch_size == "auto" else self.micro_batch_size
        together = size * num_processes
        if self.batch_size % together:
            most = self.batch_size // size
            fitting = ", ".join(str(count) for count in range(1, most + 1) if most % count == 0)
            rule = f"must be a multiple of micro_batch_size x processes = {size} x {num_processes}"
            remedy = f"With these settings use {fitting} processes, or start a run with others."
            raise ConfigError("training.batch_size", self.batch_size, rule, remedy)
        return 1 if self.micro_batch_size == "auto" else self.batch_size // together

    def total_steps(self, steps_per_epoch: int) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * steps_per_epoch

    def steps_between_evaluations(self, steps_per_epoch: int) -> int:
        return steps_per_epoch if self.eval_every == "epoch" else self.eval_every

    def first_checkpoint_step(self, num_blocks: int) -> int:
        """The step after which a run has a checkpoint."""
        evaluation = self.steps_between_evaluations(num_blocks // self.batch_size)
        return min(evaluation, self.save_every or evaluation)


@config
class RunConfig:
    """One run. `model` holds options of `AirMoeConfig`; its vocabulary follows the tokenizer."""

    label: ClassVar[str] = "run"

    preset: str  # the name it started from, for people to read
    model: dict[str, Any]
    data: DataOptions
    training: TrainingOptions

    def check(self) -> None:
        check_text("preset", self.preset)
        unknown = [name for name in self.model if name not in MODEL_OPTIONS]
        if unknown:
            raise unknown_option("model", unknown[0], self.model[unknown[0]], MODEL_OPTIONS)
        for name, value in self.model.items():
            if name in COUNTS and value is not None:
                check_count(f"model.{name}", value)
            elif name in ("rms_norm_eps", "initializer_range"):
                check_number(f"model.{name}", value, below=1.0, strict=True)
        self.model_config(vocab_size=2, eos_id=1)  # checks the rest now, not after preparing data

    def model_config(self, vocab_size: int, eos_id: int) -> AirMoeConfig:
        """The model for a tokenizer; `model.vocab_size` may only be larger than its vocabulary."""
        given = {**self.model, "bos_token_id": None, "eos_token_id": eos_id}
        if given.get("vocab_size") is None:
            given["vocab_size"] = vocab_size
        try:
            model = AirMoeConfig(**given)
        except (StrictDataclassError, TypeError) as error:  # transformers' own rules
            raise refused(error, given) from error
        if model.vocab_size < vocab_size:
            raise ConfigError(
                "model.vocab_size",
                model.vocab_size,
                f"must be >= {vocab_size}, the tokenizer's vocabulary, or token ids would be out "
                "of range",
                "Leave it out: the tokenizer's is taken.",
            )
        if model.max_position_embeddings < self.data.block_size:
            rule = f"must be <= model.max_position_embeddings = {model.max_position_embeddings}"
            remedy = "Shorten the blocks or raise max_position_embeddings."
            raise ConfigError("data.block_size", self.data.block_size, rule, remedy)
        return model

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        try:
            data, training = DataOptions(**values["data"]), TrainingOptions(**values["training"])
            return cls(**{**values, "data": data, "training": training})
        except (AttributeError, KeyError, TypeError) as error:
            rule = f"must be the settings of a run ({error!r})"
            raise ConfigError("config", "JSON", rule, "Start a new run.") from error


def model_options(config: AirMoeConfig) -> dict[str, Any]:
    """A model's settings as the `model` part of a run; the vocabulary is left to the tokenizer."""
    options = {name: getattr(config, name) for name in MODEL_OPTIONS if name != "vocab_size"}
    if options["moe_layers"] == [config.num_hidden_layers // 2]:
        options["moe_layers"] = None  # the middle one, also when the depth is overridden
    return options


def workload_of(run: RunConfig, devices: int) -> Workload:
    """One optimizer step of a run on `devices` devices, for the FLOP ledger."""
    options, block = run.training, run.data.block_size
    parts = devices * options.accumulation_steps(devices)  # refuses what does not divide
    return Workload(
        sequence_length=block,
        tokens_per_step=options.batch_size * block,
        tokens_per_micro_batch=options.batch_size // parts * block,
        devices=devices,
    )


# -- `key.path=value` on top of a run's settings --------------------------------------------------

SECTIONS: dict[str, tuple[str, ...]] = {
    "model": MODEL_OPTIONS,
    "data": tuple(field.name for field in dataclasses.fields(DataOptions)),
    "training": tuple(field.name for field in dataclasses.fields(TrainingOptions)),
}


def override(run: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """A copy of `run` with `section.option=value` applied in order.

    Values are JSON where they parse as such (numbers, true, null, lists), else plain text.
    `model.router_options.<name>` reaches into the router's own settings.
    """
    values = run.to_json()
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(
                "overrides", assignment, "must look like key.path=value", "Add '=' and a value."
            )
        try:
            value = parse_json(text)
        except json.JSONDecodeError:
            value = text
        except ValueError as error:  # JSON, but of no use to anybody
            shown, rule = text if len(text) <= 60 else f"{text[:60]}...", f"cannot be read: {error}"
            raise ConfigError(path, shown, rule, "Give another value.") from error
        _assign(values, path, value)
    return RunConfig.from_json(values)


def _assign(values: dict[str, Any], path: str, value: Any) -> None:
    section, _, option = path.partition(".")
    name, _, inner = option.partition(".")
    if section not in SECTIONS or not name:
        rule = f"must start with one of {', '.join(SECTIONS)}, then a dot and an option"
        remedy = f"{did_you_mean(section, SECTIONS)}Write for example training.steps=500."
        raise ConfigError(path, value, rule, remedy)
    if name not in SECTIONS[section]:
        raise unknown_option(section, name, value, SECTIONS[section])
    if inner and (name != "router_options" or "." in inner):
        rule = f"goes too deep: {section}.{name} has no options of its own"
        raise ConfigError(path, value, rule, "Only model.router_options.<name> has a third part.")
    if inner:
        before = values[section][name] or {}
        if not isinstance(before, dict):
            rule = "must map names to values"
            raise ConfigError(f"{section}.{name}", before, rule, "Give a JSON object.")
        value = {**before, inner: value}
    values[section][name] = value
    if path == "model.router":
        values["model"]["router_options"] = {}  # another router has other options
