"""How a swapped model is saved and loaded: a config class and model classes of its own.

A swapped Mixtral calls itself `airmoe_mixtral`, and its config says what was swapped: `airmoe` the
routers, `airmoe_ffn` the feed-forward networks. Importing this module makes the types below known
to the Auto classes; `register` adds others. Elsewhere transformers refuses such a type, instead of
dropping what it doesn't know.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from airmoe.adapt.ffn_swap import SwappedFfn, build_saved
from airmoe.adapt.router_swap import RouterSettings, exchange, find_routers
from airmoe.adapt.shortlist_router import ScaledCodebook, ShortlistRouter
from airmoe.errors import ConfigError
from airmoe.model.initialization import initialize_layer
from airmoe.transformers_internals import (
    convert_checkpoints_like,
    record_outputs_like,
    shift_labels_of,
)

# Whose routers can be swapped.
FAMILIES = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "olmoe": "OLMoE",
    "deepseek_v3": "DeepSeek-V3",
    "gpt_oss": "GPT-OSS",
}
# Dense models; `swap_ffn` registers any other type when it meets one.
DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "olmo2"),
    *("gemma", "gemma2", "gemma3_text", "gemma4_text"),
)
PREFIX = "airmoe_"
HEADS = {  # and the classes of each, by config
    AutoModel: MODEL_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
}
_Base = PreTrainedModel if TYPE_CHECKING else object


class SwappedConfig:
    """The config of a swapped model; comes before a stock class."""


class SwappedModel(_Base):
    """Swaps what its config lists when it is built; comes before a stock class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # An inner model that was built by the Auto classes has done it already.
        if config.airmoe_ffn is not None and not _has(self, SwappedFfn):
            build_saved(self, config.airmoe_ffn)
        if config.airmoe is not None and not _has(self, ShortlistRouter):
            exchange(find_routers(self), RouterSettings(**config.airmoe))
        set_config(self, config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill in what a checkpoint lacks: codebooks of routers are loaded whole or not at all."""
        if isinstance(module, ScaledCodebook):
            with torch.random.fork_rng(devices=[]):
                module.reset_parameters()
        elif not initialize_layer(module, getattr(self.config, "initializer_range", 0.02)):
            super()._init_weights(module)


def register(model_type: str) -> None:
    """Let the Auto classes load swapped models of this stock type, for example "granite"."""
    config_class_for(CONFIG_MAPPING[model_type])


# -- what every swap asks before it changes anything ----------------------------------------------


def check_model(field: str, model: object) -> None:
    """A model of transformers with its weights in memory, in floating point."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            field,
            model if isinstance(model, str) else type(model).__name__,
            "must be a model of transformers",
            "Load it first: transformers.AutoModelForCausalLM.from_pretrained(...). Of a wrapper "
            "pass the model inside (of PEFT: model.get_base_model()).",
        )
    if any(weight.is_meta for weight in model.parameters()):
        rule = "must have its weights in memory"
        remedy = "Load the model first (without offloading), then swap."
        raise ConfigError(field, "weights on the meta device", rule, remedy)
    quantized = getattr(model.config, "quantization_config", None) is not None
    if quantized or not all(weight.is_floating_point() for weight in model.parameters()):
        rule = "must have floating-point weights"
        remedy = "Load it without quantisation (or call model.dequantize()), then swap."
        raise ConfigError(field, "a quantised model", rule, remedy)


def check_layers(
    field: str, layers: Iterable[int], kind: str, available: Sequence[int]
) -> list[int]:
    """`layers` as a list of ints, which is what a config.json can hold."""
    if not isinstance(layers, Iterable):
        rule, remedy = "must be a list of whole numbers", "Give ints, for example layers=[3, 4]."
        raise ConfigError(field, layers, rule, remedy)
    numbers = [*layers]
    for number in numbers:
        if type(number) is not int or number not in available:
            rule = f"must be the number of a {kind}: {', '.join(map(str, available))}"
            remedy = "Choose among these; the first decoder layer is 0."
            raise ConfigError(field, number, rule, remedy)
    if not numbers or len(set(numbers)) != len(numbers):
        rule = "must name each layer once, and at least one"
        raise ConfigError(field, numbers, rule, "Remove repetitions and give one number or more.")
    return numbers


# -- from stock to swapped, and back --------------------------------------------------------------


def swapped_config(
    model: Any,
    *,
    routers: RouterSettings | None = None,
    ffn: Mapping[str, Any] | None = None,
) -> Any:
    """A copy of a model's config that says what was swapped."""
    new = _copy_as(config_class_for(type(model.config)), model.config)
    if routers is not None:
        new.airmoe = asdict(routers)
    if ffn is not None:
        new.airmoe_ffn = {**(new.airmoe_ffn or {}), **ffn}
    return new


def set_config(model: Any, new: Any) -> None:
    """Give every part of a model that has its config the new one, and the class that fits it.

    The old one stays as it is: a second model that was built from it is not swapped.
    """
    old = model.config
    swapped = isinstance(new, SwappedConfig)
    for part in model.modules():
        if vars(part).get("config") is old:
            part.config = new
            if isinstance(part, PreTrainedModel):
                part.__class__ = class_for(type(part)) if swapped else _stock(type(part))


def restore_configs(model: nn.Module) -> None:
    """Take the routers out of the configs of all models inside."""
    for part in model.modules():  # those around others come first
        if isinstance(part, SwappedModel) and part.config.airmoe is not None:
            stays = part.config.airmoe_ffn is not None
            new = _copy_as(type(part.config) if stays else _stock(type(part.config)), part.config)
            if stays:
                new.airmoe = None
            else:
                for name in ("airmoe", "airmoe_ffn"):
                    vars(new).pop(name, None)
            set_config(part, new)


def _copy_as(config_class: Any, config: Any) -> Any:
    changed = copy.deepcopy(config)
    changed.__class__ = config_class
    vars(changed).pop("model_type", None)  # a loaded config has its own beside that of its class
    return changed


def _has(model: nn.Module, kind: type) -> bool:
    return any(isinstance(part, kind) for part in model.modules())


# -- classes --------------------------------------------------------------------------------------


@functools.cache
def config_class_for(stock: Any) -> Any:
    """The swapped version of a config class, known to the Auto classes."""
    if issubclass(stock, SwappedConfig):
        return stock
    made: Any = _make(
        SwappedConfig,
        stock,
        __annotations__={"airmoe": "dict | None", "airmoe_ffn": "dict | None"},
        model_type=PREFIX + stock.model_type,
        airmoe=None,
        airmoe_ffn=None,
    )
    AutoConfig.register(made.model_type, made)
    for head, known in HEADS.items():
        if stock in known:
            head.register(made, _model_class(known[stock], made))
    if stock in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[stock]
        shift_labels_of(made.model_type, f"Air{causal.__name__}")
    convert_checkpoints_like(made.model_type, stock.model_type)
    return made


def class_for(stock: Any) -> Any:
    """The swapped version of a model class."""
    if issubclass(stock, SwappedModel):
        return stock
    return _model_class(stock, config_class_for(stock.config_class))


@functools.cache
def _model_class(stock: Any, config_class: Any) -> Any:
    made = _make(SwappedModel, stock, config_class=config_class)
    record_outputs_like(made, stock)
    return made


def _make(kind: type, stock: Any, **body: Any) -> Any:
    """A name of this module, so that models and configs can be pickled."""
    name = f"Air{stock.__name__}"
    doc = f"{stock.__name__} with swapped parts."
    made = type(name, (kind, stock), {"__module__": __name__, "__doc__": doc, **body})
    globals()[name] = made
    return made


def _stock(kind: type) -> type:
    """The stock class behind a swapped one; others are their own."""
    return kind.__bases__[-1] if issubclass(kind, (SwappedConfig, SwappedModel)) else kind


for _model_type in (*FAMILIES, *DENSE):
    register(_model_type)
