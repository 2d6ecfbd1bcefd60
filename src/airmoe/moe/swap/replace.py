"""Exchanging the routers of a model, and exchanging them back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from airmoe.config import check_count, config
from airmoe.errors import ConfigError
from airmoe.moe.model_check import check_model
from airmoe.moe.notice import Notice
from airmoe.moe.swap.codebook import ScaledCodebook, new_codebook
from airmoe.moe.swap.router import UNCALIBRATED, ShortlistRouter

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Model = TypeVar("Model", bound=nn.Module)


@config
class Settings:
    """What a swap was asked for, as the config of the model keeps it."""

    label: ClassVar[str] = "swap_routers"

    num_codewords: int
    shortlist_size: int
    layers: list[int] | None = None  # None: every layer with a router

    def check(self) -> None:
        check_count("swap_routers.num_codewords", self.num_codewords)
        check_count("swap_routers.shortlist_size", self.shortlist_size)
        if self.layers is not None:
            _check_numbers(self.layers)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def swap_routers(
    model: Model,
    *,
    num_codewords: int,
    shortlist_size: int,
    layers: Sequence[int] | None = None,
) -> Model:
    """Replace the routers of a Hugging Face MoE model by AIR routers with the same weights.

    Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 and GPT-OSS. A token is then scored against the
    `shortlist_size` experts of the nearest of `num_codewords` codewords, and the family's own rule
    selects among them. Until `airmoe.calibrate` has fitted the codebooks every expert is scored.
    `layers` are numbers of decoder layers; None means all that have a router. The model is changed
    in place and returned; an error changes nothing. A swap of the body is saved by its head too,
    since they share a config; one of single layers is noted nowhere.
    """
    from airmoe.moe.swap.models import family_of, set_config, swapped_classes, swapped_config

    check_model("swap_routers.model", model)
    settings = Settings(
        num_codewords=num_codewords,
        shortlist_size=shortlist_size,
        layers=[*layers] if isinstance(layers, Iterable) else layers,
    )
    _check_not_swapped(model)
    routers = find_routers(model)
    whole = _owner(model, routers)
    _check_own_config(whole)
    if not routers or (whole is not None and family_of(whole.config) is None):
        raise _unknown(model)
    _check_place(model, routers)
    if whole is None:
        exchange(routers, settings)
        return model
    # What may fail comes before the first change.
    old, new, classes = whole.config, swapped_config(whole.config, settings), swapped_classes(whole)
    exchange(routers, settings)
    set_config(model, old, new)
    for part, swapped in classes:
        part.__class__ = swapped
    return model


def restore_routers(model: Model) -> Model:
    """Undo `swap_routers`: the stock modules with their present weights, without codebooks."""
    from airmoe.moe.swap.families import stock_router_of
    from airmoe.moe.swap.models import give_class_back, set_config, stock_configs, swapped_models

    check_model("restore_routers.model", model)
    swapped = [module for module in model.modules() if isinstance(module, ShortlistRouter)]
    if not swapped and not swapped_models(model):
        raise ConfigError(
            "restore_routers.model",
            type(model).__name__,
            "must have swapped routers",
            "Only what airmoe.swap_routers has changed can be restored.",
        )
    configs = stock_configs(model)
    for router in swapped:
        router.give_back(stock_router_of(type(router)))
    for old, new in configs:
        set_config(model, old, new)
    give_class_back(model)
    return model


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The stock routers of a model that can be swapped, by name."""
    from airmoe.moe.swap.families import ROUTER_CLASSES

    return {name: part for name, part in model.named_modules() if type(part) in ROUTER_CLASSES}


def exchange(routers: dict[str, nn.Module], settings: Settings) -> None:
    """Swap those of the settings' layers; all that could fail happens before the first change."""
    from airmoe.moe.swap.families import ROUTER_CLASSES

    chosen = _choose(routers, settings.layers)
    _check_sizes(chosen, settings.shortlist_size)
    notice = Notice(UNCALIBRATED)
    prepared: list[tuple[Any, type[ShortlistRouter], ScaledCodebook]] = []
    for router in chosen.values():
        weight: Any = router.weight
        with torch.device(weight.device):
            codebook = new_codebook(settings.num_codewords, weight.shape[1])
        prepared.append((router, ROUTER_CLASSES[type(router)], codebook))
    for router, swapped, codebook in prepared:
        router.__class__ = swapped
        router.take_over(codebook, settings.shortlist_size, notice)


def _check_numbers(layers: object) -> None:
    """A config.json keeps them, so that nothing but plain ints will do."""
    if isinstance(layers, list):
        wrong = [layer for layer in layers if type(layer) is not int]
    else:
        wrong = [layers]
    if wrong:
        raise ConfigError(
            "swap_routers.layers",
            wrong[0],
            "must be a list of whole numbers",
            "Give ints, for example layers=[3, 4].",
        )


def _choose(routers: dict[str, nn.Module], layers: Sequence[int] | None) -> dict[str, nn.Module]:
    if layers is None:
        return routers
    numbers = {name: _layer_number(name) for name in routers}
    for layer in layers:
        if layer not in numbers.values():
            there = ", ".join(str(number) for number in numbers.values())
            raise ConfigError(
                "swap_routers.layers",
                layer,
                f"must be the number of a layer with a router: {there}",
                "Choose among these, or leave `layers` out to swap all.",
            )
    if not layers or len(set(layers)) != len(layers):
        raise ConfigError(
            "swap_routers.layers",
            [*layers],
            "must name each layer once, and at least one",
            "Leave `layers` out to swap all.",
        )
    return {name: router for name, router in routers.items() if numbers[name] in layers}


def _layer_number(name: str) -> int | None:
    found = LAYER.search(name)
    return int(found[1]) if found else None


def _owner(model: nn.Module, routers: dict[str, nn.Module]) -> Any:
    """The Hugging Face model: the argument itself, or what a wrapper (PEFT, DDP) holds."""
    from transformers import PreTrainedModel

    owners: list[nn.Module] = []
    seen: set[nn.Module] = set()
    for part in model.modules():  # those around others come first
        if isinstance(part, PreTrainedModel) and part not in seen:
            inside = {*part.modules()}
            seen |= inside
            owners += [part] if inside.intersection(routers.values()) else []
    if len(owners) > 1:
        raise ConfigError(
            "swap_routers.model",
            ", ".join(type(owner).__name__ for owner in owners),
            "must hold one Hugging Face model with experts, whose config says what was swapped",
            "Swap them one by one.",
        )
    return owners[0] if owners else None


def _unknown(model: nn.Module) -> ConfigError:
    from airmoe.moe.swap.models import FAMILIES

    return ConfigError(
        "swap_routers.model",
        type(model).__name__,
        f"must be one of {', '.join(FAMILIES.values())}, with at least one MoE layer",
        "For dense models there is airmoe.swap_ffn; for your own layers airmoe.MoELayer.",
    )


def _check_not_swapped(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, ShortlistRouter):
            raise ConfigError(
                "swap_routers.model",
                type(model).__name__,
                f"must have its stock routers, but {name!r} is swapped already",
                "Call airmoe.restore_routers(model) first, or keep the swap.",
            )


def _check_own_config(whole: Any) -> None:
    from airmoe.moe.swap.models import is_swapped_config

    if whole is not None and is_swapped_config(whole.config):
        raise ConfigError(
            "swap_routers.model",
            f"stock routers under an {type(whole.config).__name__}",
            "must have a config of its own, because that says what was swapped, and this one "
            "says it of another model",
            "Build each model from a copy.deepcopy(config) of its own.",
        )


def _check_place(model: nn.Module, routers: dict[str, nn.Module]) -> None:
    """Refuse weights that are not there, not plain, or not used."""
    if any(weight.is_meta for weight in model.parameters()):
        raise ConfigError(
            "swap_routers.model",
            "weights on the meta device",
            "must have its weights in memory",
            "Load the model first (without offloading), then swap.",
        )
    parts = [part for part in model.modules() if hasattr(part, "config")]
    quantized = any(
        getattr(part, "is_quantized", False)
        or getattr(part, "hf_quantizer", None) is not None
        or getattr(part.config, "quantization_config", None) is not None
        for part in parts
    ) or any(not weight.is_floating_point() for weight in model.parameters())
    if quantized:
        raise ConfigError(
            "swap_routers.model",
            "a quantised model",
            "must have floating-point weights",
            "Load it without quantisation (or call model.dequantize()), then swap.",
        )
    # The block around a router counts too: kernels from the hub may replace both at once.
    blocks = [router.rpartition(".")[0] for router in routers]
    for name in (*routers, *blocks):
        attributes = vars(model.get_submodule(name))
        if "forward" in attributes and "_old_forward" not in attributes:
            raise ConfigError(
                "swap_routers.model",
                name,
                "must run the forward of its class, but somebody has put another in its place",
                "Undo that first (for kernels from the hub: load with use_kernels=False).",
            )


def _check_sizes(routers: dict[str, Any], shortlist_size: int) -> None:
    from airmoe.moe.swap.families import ROUTER_CLASSES

    for router in routers.values():
        experts, top_k = router.num_experts, router.top_k
        if shortlist_size > experts:
            raise ConfigError(
                "swap_routers.shortlist_size",
                shortlist_size,
                f"must be <= {experts}, the number of experts",
                "Lower it.",
            )
        if shortlist_size < top_k:
            raise ConfigError(
                "swap_routers.shortlist_size",
                shortlist_size,
                f"must be >= {top_k}, the experts a token uses, which come from one shortlist",
                "Raise it.",
            )
        least = ROUTER_CLASSES[type(router)].least_shortlist(router)
        if shortlist_size < min(least, experts):
            raise ConfigError(
                "swap_routers.shortlist_size",
                shortlist_size,
                f"must be >= {least}: tokens are limited to {router.topk_group} of "
                f"{router.num_group} expert groups, and a smaller shortlist could leave fewer "
                f"than {top_k} candidates in them",
                "Raise it.",
            )
