"""Swapped models on disk: `save_pretrained` as always, `load_swapped_ffn` to read it back.

The config of a swapped model notes its layers under `airmoe_ffn`, and its file has a `model_type`
of its own, so that transformers alone refuses it (Auto classes) or says that the type is another
(the classes themselves) instead of making up the networks that are missing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from airmoe.errors import ConfigError
from airmoe.moe.ffn.dense import decoder_of, layers_of
from airmoe.moe.ffn.layer import connect
from airmoe.moe.ffn.settings import LayerSettings
from airmoe.moe.layer import MoELayer

NOTE = "airmoe_ffn"
OUR_OPTIONS = ("config", "output_loading_info")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def note_in_config(model: nn.Module, layers: Mapping[int, dict[str, Any]]) -> None:
    """Write down which layers were swapped, beside those of earlier calls."""
    config = getattr(model, "config", None)
    if config is None:
        return
    # A model without a head may be part of another, which is saved with the same config. All
    # others get one of their own: a second model of that config is not swapped.
    bare = getattr(model, "base_model", model) is model
    own = config if bare else copy.copy(config)
    note = getattr(own, NOTE, None) or {"architecture": _architecture(model), "layers": {}}
    swapped = note["layers"] | {str(index): values for index, values in layers.items()}
    setattr(own, NOTE, note | {"layers": swapped})
    _mark(own)
    for module in model.modules():
        if vars(module).get("config") is config:  # of its own: wrappers may only show it
            module.config = own


def load_swapped_ffn(
    folder: str | Path,
    *,
    model_class: type | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A model saved after `swap_ffn`, bit by bit as it was: routers, codebooks and counters too.

    `folder` is what `from_pretrained` takes, and `options` go to it (dtype, device_map, revision,
    ...). `model_class` is needed for architectures that transformers does not have.
    """
    import transformers

    options = dict(options or {})
    for name in OUR_OPTIONS:
        if name in options:
            raise ConfigError(
                f"load_swapped_ffn.options[{name!r}]",
                type(options[name]).__name__,
                "is not yours to give, because the layers come from the saved config",
                "Leave it out; change the config of the loaded model.",
            )
    hub = {name: options[name] for name in HUB_OPTIONS if name in options}
    values, _ = transformers.PreTrainedConfig.get_config_dict(folder, **hub)
    note = values.get(NOTE)
    if note is None:
        raise ConfigError(
            "load_swapped_ffn.folder",
            str(folder),
            f"must hold a model saved after swap_ffn; its config has no {NOTE!r}",
            "Load it with transformers' own from_pretrained.",
        )
    stock = _class_of(values, model_class)
    config_class: Any = stock.config_class
    values["model_type"] = config_class.model_type
    config = config_class.from_dict(values)
    _mark(config)
    model, found = _loading_class(stock).from_pretrained(
        folder, config=config, output_loading_info=True, **options
    )
    if found["missing_keys"]:
        raise ConfigError(
            "load_swapped_ffn.folder",
            str(folder),
            f"must hold every tensor, but lacks {', '.join(sorted(found['missing_keys'])[:5])}",
            "Save the swapped model again.",
        )
    model.__class__ = stock  # the class was for loading only
    _finish(model)
    return model


def _class_of(values: Mapping[str, Any], model_class: type | None) -> Any:
    """The class of a saved model; `swap_routers` has given it one of ours."""
    import transformers

    # What was saved may be more than what was swapped: a model around its decoder.
    (name,) = values.get("architectures") or [values[NOTE]["architecture"]]
    routers_too = values.get("airmoe") is not None
    if routers_too:
        name = name.removeprefix("Air")
    stock = model_class or getattr(transformers, name, None)
    if not (isinstance(stock, type) and issubclass(stock, transformers.PreTrainedModel)):
        raise ConfigError(
            "load_swapped_ffn.model_class",
            name if stock is None else stock,
            "must be a model class of transformers",
            "Name the class of the model that was swapped.",
        )
    if not routers_too:
        return stock
    from airmoe.moe.swap.models import SwappedModel, swapped_class

    return stock if issubclass(stock, SwappedModel) else swapped_class(stock)


def _architecture(model: nn.Module) -> str:
    """The class of transformers, whether or not its routers are swapped."""
    get_base_model = getattr(model, "get_base_model", None)  # adapters wrap the model
    kind = type(model if get_base_model is None else get_base_model())
    swapped = kind.__module__ == "airmoe.moe.swap.models"
    return (kind.__bases__[-1] if swapped else kind).__name__


def _loading_class(stock: type) -> Any:
    """The architecture with the layers that its config notes, while weights are read."""

    class Loading(stock):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            layers = layers_of(self)  # pyright: ignore[reportArgumentType]
            for index, values in getattr(config, NOTE)["layers"].items():
                layers[int(index)].mlp = LayerSettings.from_dict(values).build()

    # Transformers looks classes up by what they are called.
    Loading.__name__, Loading.__qualname__ = stock.__name__, stock.__qualname__
    Loading.__module__ = stock.__module__
    return Loading


def _finish(model: nn.Module) -> None:
    """Clear the derived buffers, which no file holds."""
    for layer in model.modules():
        if not isinstance(layer, MoELayer):
            continue
        for module in layer.modules():
            for name in module._non_persistent_buffers_set:
                module.get_buffer(name).zero_()
    connect(decoder_of(model))


# -- the type on disk ---------------------------------------------------------------------------


def _mark(config: Any) -> None:
    """Let the config be saved under a model type of ours; in memory it says what it said."""
    if not isinstance(config, _Marked):
        vars(config).pop("model_type", None)  # a loaded config has it beside that of its class
        config.__class__ = _marked_class(type(config))


class _Marked:
    """A config of a swapped model. Pickles without its class, which exists at run time only."""

    _stock: type

    def __setattr__(self, name: str, value: Any) -> None:
        # `swap_routers` and `restore_routers` give configs another class: the mark stays.
        if name == "__class__" and not issubclass(value, _Marked):
            value = _marked_class(value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._stock, self.__dict__)


class _ModelType:
    """What transformers writes down is the type of the class; the config itself has its old one."""

    def __init__(self, stock: str) -> None:
        self.stock = stock

    def __get__(self, config: Any, owner: type) -> str:
        return f"{NOTE}_{self.stock}" if config is None else self.stock


@functools.cache
def _marked_class(stock: Any) -> type:
    names = {"model_type": _ModelType(stock.model_type), "_stock": stock}
    # `restore_routers` takes the last base of a config's class for the one to go back to.
    return type(stock.__name__, (_Marked, stock, stock.__bases__[-1]), names)


def _unpickle(stock: type, values: dict[str, Any]) -> Any:
    config: Any = object.__new__(_marked_class(stock))
    config.__dict__.update(values)
    return config
