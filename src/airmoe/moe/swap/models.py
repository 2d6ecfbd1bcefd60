"""Swapped models as transformers sees them: a config and model classes of their own.

A swapped checkpoint calls itself, say, `airmoe_mixtral`. Importing this module makes that known to
the Auto classes; where it was not imported, transformers refuses a type that it does not know,
instead of dropping the codebooks.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
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
    PreTrainedConfig,
    PreTrainedModel,
)

from airmoe.moe.swap.codebook import ScaledCodebook
from airmoe.moe.swap.replace import Settings, exchange, find_routers
from airmoe.moe.swap.router import ShortlistRouter
from airmoe.transformers_internals import (
    convert_checkpoints_like,
    record_outputs_like,
    shift_labels_of,
)

FAMILIES = {
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "olmoe": "OLMoE",
    "deepseek_v3": "DeepSeek-V3",
    "gpt_oss": "GPT-OSS",
}
PREFIX = "airmoe_"
HEADS = {  # and the classes of each, by config
    AutoModel: MODEL_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForQuestionAnswering: MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}
_Base = PreTrainedModel if TYPE_CHECKING else object


class SwappedModel(_Base):
    """Built from a config with `airmoe` settings, it swaps its routers; before a stock class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # An inner model that was built by the Auto classes has done it already.
        done = any(isinstance(part, ShortlistRouter) for part in self.modules())
        if config.airmoe is not None and not done:
            exchange(find_routers(self), Settings(**config.airmoe))
        for part, swapped in swapped_classes(self):
            part.__class__ = swapped

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """What a checkpoint lacks: a codebook comes whole or starts anew, unlearned."""
        if isinstance(module, ScaledCodebook):
            with torch.random.fork_rng(devices=[]):
                module.reset_parameters()
        else:
            super()._init_weights(module)


def family_of(config: Any) -> str | None:
    """The model type of a supported stock config; one of somebody's own class is not."""
    model_type = getattr(config, "model_type", None)
    stock = getattr(type(config), "_stock", type(config))  # also where swap_ffn marked it
    if model_type not in FAMILIES or stock is not _stock_class(CONFIGS[model_type]):
        return None
    return model_type


def is_swapped_config(config: Any) -> bool:
    return isinstance(config, tuple(CONFIGS.values()))


def swapped_config(config: Any, settings: Settings) -> Any:
    """A copy of a stock config that also says how the routers were swapped."""
    changed = _copy_as(CONFIGS[config.model_type], config)
    changed.airmoe = settings.as_dict()
    return changed


def stock_configs(model: nn.Module) -> list[tuple[Any, Any]]:
    """(swapped config, the way back with what was changed meanwhile) of all models inside."""
    found = {id(part.config): part.config for part in swapped_models(model)}
    pairs = []
    for config in found.values():
        if is_swapped_config(config):
            changed = _copy_as(_stock_class(type(config)), config)
            vars(changed).pop("airmoe", None)
            pairs.append((config, changed))
    return pairs


def _copy_as(config_class: Any, config: Any) -> Any:
    changed = copy.deepcopy(config)
    changed.__class__ = config_class
    vars(changed).pop("model_type", None)  # a loaded config has its own beside that of its class
    changed.architectures = None  # written when the model is saved
    return changed


def set_config(model: nn.Module, old: Any, new: Any) -> None:
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


def swapped_classes(model: nn.Module) -> list[tuple[Any, Any]]:
    """(part, the swapped version of its class) for a stock model and those inside it."""
    return [
        (part, swapped_class(type(part)))
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and not isinstance(part, SwappedModel)
    ]


def swapped_models(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, SwappedModel)]


def give_class_back(model: nn.Module) -> None:
    for part in swapped_models(model):
        part.__class__ = _stock_class(type(part))


def swapped_class(stock: Any) -> Any:
    """The swapped version of a model class: made once, a name of this module."""
    name = f"Air{stock.__name__}"
    made = globals().get(name)
    if made is None or _stock_class(made) is not stock:
        config_class = CONFIGS[stock.config_class.model_type.removeprefix(PREFIX)]
        body = {
            "__module__": __name__,
            "__doc__": f"{stock.__name__} with AIR routers.",
            "config_class": config_class,
        }
        made = globals()[name] = type(name, (SwappedModel, stock), body)
        record_outputs_like(made, stock)
    return made


def _stock_class(swapped: type) -> Any:
    return swapped.__bases__[-1]


def _define_config(model_type: str) -> type[PreTrainedConfig]:
    stock = type(AutoConfig.for_model(model_type))
    body = {
        "__module__": __name__,
        "__doc__": f"{stock.__name__} of a model with AIR routers; `airmoe` says which.",
        "__annotations__": {"airmoe": "dict | None"},
        "model_type": PREFIX + model_type,
        "airmoe": None,
    }
    name = f"Air{stock.__name__}"
    made = globals()[name] = type(name, (stock,), body)
    return made


def _register(model_type: str) -> None:
    config_class = CONFIGS[model_type]
    stock = _stock_class(config_class)
    AutoConfig.register(config_class.model_type, config_class)
    for head, known in HEADS.items():
        if stock in known:
            head.register(config_class, swapped_class(known[stock]))
    causal = swapped_class(MODEL_FOR_CAUSAL_LM_MAPPING[stock])
    shift_labels_of(config_class.model_type, causal.__name__)
    convert_checkpoints_like(config_class.model_type, model_type)


CONFIGS = {model_type: _define_config(model_type) for model_type in FAMILIES}
for _model_type in FAMILIES:
    _register(_model_type)
