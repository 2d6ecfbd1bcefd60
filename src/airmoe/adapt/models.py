"""How a swapped model is saved and loaded: a config class and model classes of its own.

A swapped Mixtral calls itself `airmoe_mixtral`, and its config says what was swapped: `airmoe` the
routers, `airmoe_ffn` the feed-forward networks. Importing this module makes the types below known
to the Auto classes; `register` adds others. Elsewhere transformers refuses such a type, instead of
dropping what it doesn't know.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import transformers as hf
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from airmoe.adapt.ffn_swap import SwappedFfn, build_saved
from airmoe.adapt.router_swap import RouterSettings, check_is_model, exchange, find_routers
from airmoe.adapt.shortlist_router import ScaledCodebook, ShortlistRouter
from airmoe.errors import ConfigError
from airmoe.model.initialization import initialize_layer
from airmoe.transformers_internals import (
    convert_checkpoints_like,
    record_outputs_like,
    shift_labels_of,
)

# Families whose routers can be swapped.
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
# Field of a config that says what was swapped -> the modules that this put in.
SWAPS: dict[str, type[nn.Module]] = {"airmoe": ShortlistRouter, "airmoe_ffn": SwappedFfn}
HEADS = {  # and the classes of each, by config
    hf.AutoModel: hf.MODEL_MAPPING,
    hf.AutoModelForCausalLM: hf.MODEL_FOR_CAUSAL_LM_MAPPING,
    hf.AutoModelForSequenceClassification: hf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    hf.AutoModelForTokenClassification: hf.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    hf.AutoModelForQuestionAnswering: hf.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
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
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and part.config is config:
                part.__class__ = class_for(type(part))

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


# -- checked before any change --------------------------------------------------------------------


def check_model(field: str, model: Any) -> None:
    """A model with its weights in memory, in floating point."""
    check_is_model(field, model)
    if any(weight.is_meta for weight in model.parameters()):
        rule = "must have its weights in memory"
        remedy = "Load the model first (without offloading), then swap."
        raise ConfigError(field, "weights on the meta device", rule, remedy)
    configs = [getattr(part, "config", None) for part in model.modules()]
    quantized = any(getattr(config, "quantization_config", None) is not None for config in configs)
    if quantized or not all(weight.is_floating_point() for weight in model.parameters()):
        rule = "must have floating-point weights"
        remedy = "Load it without quantisation (or call model.dequantize()), then swap."
        raise ConfigError(field, "a quantised model", rule, remedy)


def check_layers(field: str, layers: object, kind: str, available: Iterable[int]) -> list[int]:
    """`layers` as a list of ints, which is what a config.json can hold."""
    numbers: list[Any] = [*layers] if isinstance(layers, Iterable) else [layers]
    wrong = [number for number in numbers if type(number) is not int]
    if wrong or not isinstance(layers, Iterable):
        rule, remedy = "must be a list of whole numbers", "Give ints, for example layers=[3, 4]."
        raise ConfigError(field, wrong[0] if wrong else layers, rule, remedy)
    known = [*available]
    for number in numbers:
        if number not in known:
            rule = f"must be the number of a {kind}: {', '.join(map(str, known))}"
            remedy = "Choose among these; the first decoder layer is 0."
            raise ConfigError(field, number, rule, remedy)
    if not numbers or len(set(numbers)) != len(numbers):
        rule = "must name each layer once, and at least one"
        raise ConfigError(field, numbers, rule, "Remove repetitions and give one number or more.")
    return numbers


def config_of(model: nn.Module, parts: Iterable[nn.Module], field: str) -> Any:
    """The config of the one Hugging Face model that holds these parts: `model` or one inside.

    None for layers without one. No other model may have this config, which says what was swapped.
    """
    wanted, inside = {*parts}, set[nn.Module]()
    owners: list[Any] = []
    for module in model.modules():  # outer ones come first
        if isinstance(module, PreTrainedModel) and module not in inside:
            held = {*module.modules()}
            inside |= held
            owners += [module] if held & wanted else []
    if not owners:
        return None
    if len(owners) > 1:
        rule = "must hold one Hugging Face model with experts, whose config says what was swapped"
        names = ", ".join(type(owner).__name__ for owner in owners)
        raise ConfigError(field, names, rule, "Swap each of them by itself.")
    (owner,) = owners
    for name, kind in SWAPS.items():
        if getattr(owner.config, name, None) is not None and not _has(owner, kind):
            raise ConfigError(
                field,
                f"stock modules under an {type(owner.config).__name__}",
                "must have a config of its own, because that says what was swapped, and this one "
                "says it of another model",
                "Build each model from a copy.deepcopy(config) of its own.",
            )
    return owner.config


def has_known_routers(config: Any) -> bool:
    """Whether its family's routers can be swapped; a config class of the user's own has none."""
    stock: Any = _stock(type(config))
    model_type = getattr(stock, "model_type", None)
    return model_type in FAMILIES and stock is CONFIG_MAPPING[model_type]


# -- from stock to swapped, and back --------------------------------------------------------------


def plan_change(model: nn.Module, old: Any, **swaps: Any) -> Callable[[], None]:
    """Plan a config in place of `old` that also says `swaps`; None takes a swap out.

    Everything that may fail happens now; calling the result makes the change in `model`.
    """
    if old is None:  # nothing says what was swapped
        return lambda: None
    fields = {name: getattr(old, name, None) for name in SWAPS} | swaps
    fields = {name: value for name, value in fields.items() if value is not None}
    stock = _stock(type(old))
    new = copy.deepcopy(old)
    new.__class__ = config_class_for(stock) if fields else stock
    for name in (*SWAPS, "model_type"):  # a loaded config has a type beside that of its class
        vars(new).pop(name, None)
    vars(new).update(fields, architectures=None)  # these are written when the model is saved
    return functools.partial(_set_config, model, old, new)


def plan_restore(model: nn.Module) -> list[Callable[[], None]]:
    """Plan to take the routers out of all configs inside; calling the results does it.

    A head whose body was restored has a stock config, but is still of a swapped class.
    """
    swapped: list[Any] = [part for part in model.modules() if isinstance(part, SwappedModel)]
    configs = {id(part.config): part.config for part in swapped}.values()
    chosen = [old for old in configs if getattr(old, "airmoe", {}) is not None]
    return [plan_change(model, old, airmoe=None) for old in chosen]


def _set_config(model: nn.Module, old: Any, new: Any) -> None:
    """Replace a config in every part of the model that holds it, and change their classes to match.

    A whole model gets a new object, because a second model built from the old one is not swapped.
    A body may have a head around it that is saved with the same config but cannot be seen from
    inside, so the old object is changed in place.
    """
    # Not `getattr`: a wrapper may have a property that shows the config of what it wraps.
    holders = [part for part in model.modules() if vars(part).get("config") is old]
    models: list[Any] = [part for part in holders if isinstance(part, PreTrainedModel)]
    if models[0].base_model is models[0]:
        vars(old).clear()
        vars(old).update(vars(new))
        old.__class__ = type(new)
    else:
        for part in holders:
            part.config = new
    swapped = isinstance(new, SwappedConfig)
    for part in models:
        part.__class__ = class_for(type(part)) if swapped else _stock(type(part))


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
        __annotations__=dict.fromkeys(SWAPS, "dict | None"),
        model_type=PREFIX + stock.model_type,
        **dict.fromkeys(SWAPS),
    )
    if made.model_type in CONFIG_MAPPING:
        return made  # of a config class of the user's own, under the type of another
    AutoConfig.register(made.model_type, made)
    for head, known in HEADS.items():
        if stock in known:
            head.register(made, _model_class(known[stock], made))
    if stock in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        causal: Any = hf.MODEL_FOR_CAUSAL_LM_MAPPING[stock]
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
