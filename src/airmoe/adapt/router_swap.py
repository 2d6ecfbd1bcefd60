"""`swap_routers` and `restore_routers`: AIR in the place of a model's own routers, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from airmoe.adapt.shortlist_router import ScaledCodebook, ShortlistRouter
from airmoe.config import check_count, config
from airmoe.errors import ConfigError

Model = TypeVar("Model", bound=nn.Module)


@config
class RouterSettings:
    """The arguments of a swap, as the model's config keeps them."""

    label: ClassVar[str] = "swap_routers"

    num_codewords: int
    shortlist_size: int
    layers: list[int] | None = None  # None: every layer with a router

    def check(self) -> None:
        check_count("swap_routers.num_codewords", self.num_codewords)
        check_count("swap_routers.shortlist_size", self.shortlist_size)


def swap_routers(
    model: Model,
    *,
    num_codewords: int,
    shortlist_size: int,
    layers: Iterable[int] | None = None,
) -> Model:
    """Replace the routers of a Hugging Face MoE model by AIR routers with the same weights.

    Works for Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 and GPT-OSS. A token is then scored against the
    `shortlist_size` experts of the nearest of `num_codewords` codewords, and the family's own rule
    selects among them. Until `airmoe.calibrate` has fitted the codebooks every expert is scored.
    `layers` are numbers of decoder layers; None means all that have a router. The model is changed
    in place and returned; an impossible argument raises `ConfigError` before any change.
    """
    from airmoe.adapt.models import FAMILIES, check_layers, check_model, set_config, swapped_config

    check_model("swap_routers.model", model)
    routers = find_routers(model)
    if not routers:
        rule = f"must be one of {', '.join(FAMILIES.values())}, with at least one MoE layer"
        remedy = "For dense models there is airmoe.swap_ffn; for your own layers airmoe.MoELayer."
        raise ConfigError("swap_routers.model", type(model).__name__, rule, remedy)
    if any(isinstance(router, ShortlistRouter) for router in routers.values()):
        rule = "must have its stock routers, but is swapped already"
        remedy = "Call airmoe.restore_routers(model) first, or keep the swap."
        raise ConfigError("swap_routers.model", type(model).__name__, rule, remedy)
    if layers is not None:
        layers = check_layers("swap_routers.layers", layers, "layer with a router", [*routers])
    settings = RouterSettings(
        num_codewords=num_codewords, shortlist_size=shortlist_size, layers=layers
    )
    exchange(routers, settings)
    set_config(model, swapped_config(model, routers=settings))
    return model


def restore_routers(model: Model) -> Model:
    """Undo `swap_routers`: the stock modules with their present weights, without codebooks."""
    from airmoe.adapt.models import restore_configs

    for router in swapped_routers("restore_routers.model", model).values():
        router.give_back()
    restore_configs(model)
    return model


def swapped_routers(field: str, model: object) -> dict[str, Any]:
    """The swapped routers of a model or of what wraps it, by name."""
    if not isinstance(model, nn.Module):
        value = model if isinstance(model, str) else type(model).__name__
        raise ConfigError(field, value, "must be a model", "Load it first.")
    found = {name: m for name, m in model.named_modules() if isinstance(m, ShortlistRouter)}
    if not found:
        rule = "must have swapped routers"
        remedy = "Call airmoe.swap_routers first. An AirRouter learns its codebook in training."
        raise ConfigError(field, type(model).__name__, rule, remedy)
    return found


def find_routers(model: Any) -> dict[int, Any]:
    """The routers of a model that can be swapped, or are, by the number of their layer."""
    from airmoe.adapt.families import ROUTER_CLASSES

    layers: Any = getattr(model.get_decoder(), "layers", ())
    return {
        number: part
        for number, layer in enumerate(layers)
        for part in layer.modules()
        if type(part) in ROUTER_CLASSES or isinstance(part, ShortlistRouter)
    }


def exchange(routers: Mapping[int, Any], settings: RouterSettings) -> None:
    """Swap those of the settings' layers; all that could fail happens before the first change."""
    from airmoe.adapt.families import ROUTER_CLASSES

    chosen = [routers[layer] for layer in settings.layers or routers]
    for router in chosen:
        _check_size(router, ROUTER_CLASSES[type(router)], settings.shortlist_size)
    warned: list[str] = []
    for router in chosen:
        # The program's random numbers are not used up.
        with torch.random.fork_rng(devices=[]), torch.device(router.weight.device):
            codebook = ScaledCodebook(settings.num_codewords, router.weight.shape[1])
        router.__class__ = ROUTER_CLASSES[type(router)]
        router.take_over(codebook, settings.shortlist_size, warned)


def _check_size(router: Any, kind: type[ShortlistRouter], shortlist_size: int) -> None:
    field, experts, top_k = "swap_routers.shortlist_size", router.num_experts, router.top_k
    least = min(kind.least_shortlist(router), experts)
    if shortlist_size > experts:
        rule = f"must be <= {experts}, the number of experts"
        raise ConfigError(field, shortlist_size, rule, "Lower it.")
    if shortlist_size < least:
        rule = f"must be >= {least}, the experts a token uses, which come from one shortlist"
        if least > top_k:
            rule = (
                f"must be >= {least}: tokens are limited to {router.topk_group} of "
                f"{router.num_group} expert groups, and a smaller shortlist could leave fewer "
                f"than {top_k} candidates in them"
            )
        raise ConfigError(field, shortlist_size, rule, "Raise it.")
