"""How a swapped model is saved and loaded: a config class and model classes of its own.

A swapped Mixtral calls itself `airmoe_mixtral`, and its config says what was swapped: `airmoe` the
routers, `airmoe_ffn` the feed-forward networks. Importing this module makes the types below known
to the Auto classes; `register` adds others. Elsewhere transformers refuses such a type, instead of
dropping what it doesn't know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from airmoe.adapt.ffn_swap import FfnSettings, SwappedFfn, build_saved
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
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForQuestionAnswering: MODEL_FOR_QUESTION_ANSWERING_MAPPING,
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
        for part, swapped in _classes_for(self, config):
            part.__class__ = swapped

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill in what a checkpoint lacks: codebooks of routers are loaded whole or not at all."""
        if isinstance(module, ScaledCodebook):
            with torch.random.fork_rng(devices=[]):
                module.reset_parameters()
        elif not initialize_layer(module, getattr(self.config, "initializer_range", 0.02)):
            super()._init_weights(module)


# -- from stock to swapped ------------------------------------------------------------------------


def register(model_type: str) -> None:
    """Let the Auto classes load swapped models of this stock type, for example "granite"."""
    config_class_for(CONFIG_MAPPING[model_type])


def plan_swap(
    model: nn.Module,
    whole: Any,
    *,
    routers: RouterSettings | None = None,
    ffn: Mapping[int, FfnSettings] | None = None,
) -> Callable[[], None]:
    """Plan the change of config and classes for `whole` inside `model`; the result carries it out.

    Everything that may fail happens now, before the first change.
    """
    if whole is None:  # layers without a Hugging Face model around them
        return lambda: None
    old = whole.config
    new = _copy_as(config_class_for(type(old)), old)
    if routers is not None:
        new.airmoe = asdict(routers)
    if ffn is not None:
        noted = {str(number): settings.to_dict() for number, settings in ffn.items()}
        new.airmoe_ffn = {**(new.airmoe_ffn or {}), **noted}
    classes = _classes_for(whole, old)

    def change() -> None:
        _set_config(model, old, new)
        for part, swapped in classes:
            part.__class__ = swapped

    return change


def owner_of(model: nn.Module, parts: Iterable[nn.Module], field: str) -> Any:
    """The Hugging Face model that holds these parts: the argument, or what it wraps (PEFT, DDP)."""
    owners: list[Any] = []
    wanted, seen = {*parts}, set[nn.Module]()
    for module in model.modules():  # those around others come first
        if isinstance(module, PreTrainedModel) and module not in seen:
            inside = {*module.modules()}
            seen |= inside
            owners += [module] if inside & wanted else []
    if len(owners) > 1:
        rule = "must hold one Hugging Face model with experts, whose config says what was swapped"
        remedy = "Swap them one by one."
        raise ConfigError(field, ", ".join(type(owner).__name__ for owner in owners), rule, remedy)
    if owners:
        _check_own_config(field, owners[0])
    return owners[0] if owners else None


def _check_own_config(field: str, whole: Any) -> None:
    config = whole.config
    for name, kind in (("airmoe", ShortlistRouter), ("airmoe_ffn", SwappedFfn)):
        if getattr(config, name, None) is not None and not _has(whole, kind):
            raise ConfigError(
                field,
                f"stock modules under an {type(config).__name__}",
                "must have a config of its own, because that says what was swapped, and this one "
                "says it of another model",
                "Build each model from a copy.deepcopy(config) of its own.",
            )


def family_of(config: Any) -> str | None:
    """The family of a config whose routers can be swapped; one of a user's own class has none."""
    stock: Any = _stock(type(config))
    model_type = getattr(stock, "model_type", None)
    known = model_type in FAMILIES and stock is CONFIG_MAPPING[model_type]
    return model_type if known else None


def _classes_for(model: nn.Module, config: Any) -> list[tuple[Any, Any]]:
    """(part, the swapped version of its class) for the stock models that share this config."""
    return [
        (part, class_for(type(part)))
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        and part.config is config
        and not isinstance(part, SwappedModel)
    ]


def _copy_as(config_class: Any, config: Any) -> Any:
    changed = copy.deepcopy(config)
    changed.__class__ = config_class
    vars(changed).pop("model_type", None)  # a loaded config has its own beside that of its class
    changed.architectures = None  # written when the model is saved
    return changed


def _set_config(model: nn.Module, old: Any, new: Any) -> None:
    """Put a config in the place of another, wherever the model's parts hold it.

    A body may have a head around it, which is not seen from inside and is saved with the same
    config: there the old object becomes like the new one. Whole models get the new one for
    themselves, because a second model of the old one is not swapped.
    """
    # Of its own: the property of a wrapper shows what it wraps, and cannot be set.
    holders = [module for module in model.modules() if vars(module).get("config") is old]
    outermost = next(module for module in holders if isinstance(module, PreTrainedModel))
    if outermost.base_model is outermost:
        vars(old).clear()
        vars(old).update(vars(new))
        old.__class__ = type(new)
        return
    for module in holders:
        module.config = new


# -- and back -------------------------------------------------------------------------------------


def plan_restore(model: nn.Module) -> Callable[[], None]:
    """Plan to take the routers out of all configs inside; the result carries it out."""
    changes = []
    for config in {id(part.config): part.config for part in swapped_models(model)}.values():
        stays = getattr(config, "airmoe_ffn", None) is not None
        new = _copy_as(type(config) if stays else _stock(type(config)), config)
        if stays:
            new.airmoe = None
        else:
            for name in ("airmoe", "airmoe_ffn"):
                vars(new).pop(name, None)
        changes.append((config, new))

    def change() -> None:
        for old, new in changes:
            _set_config(model, old, new)
        for part in swapped_models(model):
            if not isinstance(part.config, SwappedConfig):
                part.__class__ = _stock(type(part))

    return change


def has_leftovers(model: nn.Module) -> bool:
    """Whether a head is still of a swapped class, though the routers of its body were restored."""
    return any(not isinstance(part.config, SwappedConfig) for part in swapped_models(model))


def swapped_models(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, SwappedModel)]


# -- classes --------------------------------------------------------------------------------------


def config_class_for(stock: Any) -> Any:
    """The swapped version of a config class, known to the Auto classes."""
    if issubclass(stock, SwappedConfig):
        return stock
    made = _made(stock)
    if made is None:
        made = _make(
            SwappedConfig,
            stock,
            __annotations__={"airmoe": "dict | None", "airmoe_ffn": "dict | None"},
            model_type=PREFIX + stock.model_type,
            airmoe=None,
            airmoe_ffn=None,
        )
        _register(made, stock)
    return made


def class_for(stock: Any) -> Any:
    """The swapped version of a model class."""
    made = _made(stock)
    if made is None:
        made = _make(SwappedModel, stock, config_class=config_class_for(stock.config_class))
        record_outputs_like(made, stock)
    return made


def _made(stock: Any) -> Any:
    """The swapped version of a class, if it was made before."""
    made = globals().get(f"Air{stock.__name__}")
    return made if made is not None and _stock(made) is stock else None


def _make(kind: type, stock: Any, **body: Any) -> Any:
    """A name of this module, so that models and configs can be pickled."""
    name = f"Air{stock.__name__}"
    doc = f"{stock.__name__} with swapped parts."
    made = type(name, (kind, stock), {"__module__": __name__, "__doc__": doc, **body})
    globals()[name] = made
    return made


def _register(config_class: Any, stock: Any) -> None:
    if config_class.model_type in CONFIG_MAPPING:
        return  # a config class of the user's own, under the type of another
    AutoConfig.register(config_class.model_type, config_class)
    for head, known in HEADS.items():
        if stock in known:
            head.register(config_class, class_for(known[stock]))
    if stock in MODEL_FOR_CAUSAL_LM_MAPPING:
        causal = class_for(MODEL_FOR_CAUSAL_LM_MAPPING[stock])
        shift_labels_of(config_class.model_type, causal.__name__)
    convert_checkpoints_like(config_class.model_type, stock.model_type)


def _has(model: nn.Module, kind: type) -> bool:
    return any(isinstance(part, kind) for part in model.modules())


def _stock(kind: type) -> type:
    """The stock class behind a swapped one; others are their own."""
    return kind.__bases__[-1] if issubclass(kind, (SwappedConfig, SwappedModel)) else kind


for _model_type in (*FAMILIES, *DENSE):
    if _model_type in CONFIG_MAPPING:
        register(_model_type)
