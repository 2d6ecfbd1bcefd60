"""Swapped models on disk: `save_pretrained` as always, `load_swapped_ffn` to read it back.

The config of a swapped model notes its layers under `airmoe_ffn`, and its file has a `model_type`
of its own, so that transformers alone refuses it (Auto classes) or says that the type is another
(the classes themselves) instead of making up the networks that are missing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from airmoe.errors import ConfigError
from airmoe.moe.ffn.dense import decoder_of, layers_of
from airmoe.moe.ffn.layer import connect
from airmoe.moe.ffn.settings import LayerSettings, freeze_unreachable
from airmoe.moe.layer import MoELayer

NOTE = "airmoe_ffn"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def note_in_config(model: nn.Module, layers: Mapping[int, dict[str, Any]]) -> None:
    """Write down which layers were swapped, beside those of earlier calls."""
    config = getattr(model, "config", None)
    if config is None:
        return
    note = getattr(config, NOTE, None) or {"architecture": _architecture(model), "layers": {}}
    swapped = note["layers"] | {str(index): values for index, values in layers.items()}
    setattr(config, NOTE, note | {"layers": swapped})
    _mark(config)


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
    stock = model_class or getattr(transformers, note["architecture"], None)
    if not (isinstance(stock, type) and issubclass(stock, transformers.PreTrainedModel)):
        raise ConfigError(
            "load_swapped_ffn.model_class",
            note["architecture"] if stock is None else stock,
            "must be a model class of transformers",
            "Name the class of the model that was swapped.",
        )
    config_class: Any = stock.config_class
    values["model_type"] = config_class.model_type
    config = config_class.from_dict(values)
    _mark(config)
    model, found = _loading_class(stock).from_pretrained(
        folder, config=config, **(options | {"output_loading_info": True})
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


def _architecture(model: nn.Module) -> str:
    get_base_model = getattr(model, "get_base_model", None)  # adapters wrap the model
    return type(model if get_base_model is None else get_base_model()).__name__


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
    """What loading leaves open: memory of derived buffers, and which weights are frozen."""
    for layer in model.modules():
        if not isinstance(layer, MoELayer):
            continue
        for module in layer.modules():
            for name in module._non_persistent_buffers_set:
                module.get_buffer(name).zero_()
        freeze_unreachable(layer.router)
    connect(decoder_of(model))


# -- the type on disk ---------------------------------------------------------------------------


def _mark(config: Any) -> None:
    """Let the config be saved under a model type of ours; in memory it says what it said."""
    if isinstance(config, _Marked):
        return
    stock = type(config)
    config.__dict__["model_type"] = stock.model_type
    config.__class__ = _marked_class(stock)


class _Marked:
    """A config of a swapped model. Pickles without its class, which exists at run time only."""

    _stock: type

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._stock, self.__dict__)


@functools.cache
def _marked_class(stock: Any) -> type:
    names = {"model_type": f"airmoe_ffn_{stock.model_type}", "_stock": stock}
    return type(stock.__name__, (_Marked, stock), names)


def _unpickle(stock: type, values: dict[str, Any]) -> Any:
    config: Any = object.__new__(_marked_class(stock))
    config.__dict__.update(values)
    return config
