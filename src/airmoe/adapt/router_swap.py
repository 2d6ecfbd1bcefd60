"""`swap_routers` and `restore_routers`: AIR in place of a model's own routers, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from airmoe.adapt.shortlist_router import ShortlistRouter, new_codebook
from airmoe.config import check_count, config
from airmoe.errors import ConfigError

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
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
    """Replace the routers of a Hugging Face MoE model with AIR routers that have the same weights.

    Works for Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 and GPT-OSS. A token is then scored against the
    `shortlist_size` experts of the nearest of `num_codewords` codewords, and the family's own rule
    selects among them. Until `airmoe.calibrate` has fitted the codebooks every expert is scored.
    `layers` are numbers of decoder layers; None means all that have a router. The model is changed
    in place and returned; an error changes nothing. If you pass the body of a model, its head saves
    the swap too, because both share a config; a swap of single layers is saved nowhere.
    """
    from airmoe.adapt.models import FAMILIES, check_model, config_of, has_known_routers, plan_change

    check_model("swap_routers.model", model)
    for name, part in model.named_modules():
        if isinstance(part, ShortlistRouter):
            rule = f"must have its stock routers, but {name!r} is swapped already"
            remedy = "Call airmoe.restore_routers(model) first, or keep the swap."
            raise ConfigError("swap_routers.model", type(model).__name__, rule, remedy)
    routers = find_routers(model)
    old = config_of(model, routers.values(), "swap_routers.model")
    if not routers or (old is not None and not has_known_routers(old)):
        rule = f"must be one of {', '.join(FAMILIES.values())}, with at least one MoE layer"
        remedy = "For dense models there is airmoe.swap_ffn; for your own layers airmoe.MoELayer."
        raise ConfigError("swap_routers.model", type(model).__name__, rule, remedy)
    _check_forwards(model, routers)
    settings = RouterSettings(
        num_codewords=num_codewords,
        shortlist_size=shortlist_size,
        layers=None if layers is None else [*choose(routers, layers)],
    )
    change = plan_change(model, old, airmoe=asdict(settings))
    exchange(routers, settings)
    # Nothing can fail from here on.
    change()
    return model


def restore_routers(model: Model) -> Model:
    """Undo `swap_routers`: the stock modules with their present weights, without codebooks."""
    from airmoe.adapt.models import plan_restore

    check_is_model("restore_routers.model", model)
    swapped = [module for module in model.modules() if isinstance(module, ShortlistRouter)]
    changes = plan_restore(model)
    if not swapped and not changes:
        rule = "must have swapped routers"
        remedy = "Only what airmoe.swap_routers has changed can be restored."
        raise ConfigError("restore_routers.model", type(model).__name__, rule, remedy)
    for router in swapped:
        router.give_back()
    for change in changes:
        change()
    return model


def check_is_model(field: str, model: object) -> None:
    """A model that was built or loaded, not its name."""
    if not isinstance(model, nn.Module):
        given = model if isinstance(model, str) else type(model).__name__
        remedy = "Load it first: transformers.AutoModelForCausalLM.from_pretrained(...)."
        raise ConfigError(field, given, "must be a model", remedy)


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The stock routers of a model that can be swapped, by name."""
    from airmoe.adapt.families import ROUTER_CLASSES

    return {name: part for name, part in model.named_modules() if type(part) in ROUTER_CLASSES}


def exchange(routers: Mapping[Any, nn.Module], settings: RouterSettings) -> None:
    """Swap those of the settings' layers; all that could fail happens before the first change."""
    from airmoe.adapt.families import ROUTER_CLASSES

    if settings.layers is not None:
        routers = choose(routers, settings.layers)
    chosen: list[Any] = [*routers.values()]
    codebooks = []
    for router in chosen:
        _check_size(router, ROUTER_CLASSES[type(router)], settings.shortlist_size)
        with torch.device(router.weight.device):
            codebooks.append(new_codebook(settings.num_codewords, router.weight.shape[1]))
    warned: list[str] = []
    for router, codebook in zip(chosen, codebooks, strict=True):
        router.__class__ = ROUTER_CLASSES[type(router)]
        router.take_over(codebook, settings.shortlist_size, warned)


def choose(routers: Mapping[str, nn.Module], layers: Iterable[int]) -> dict[int, nn.Module]:
    """The routers of these decoder layers, by number."""
    from airmoe.adapt.models import check_layers

    matches = {name: LAYER.search(name) for name in routers}
    numbered = {int(match[1]): routers[name] for name, match in matches.items() if match}
    numbers = check_layers("swap_routers.layers", layers, "layer with a router", numbered)
    return {number: numbered[number] for number in numbers}


def _check_forwards(model: nn.Module, routers: Iterable[str]) -> None:
    """Refuse routers whose own forward would not run.

    This includes the block around a router: kernels from the hub may replace both at once.
    """
    blocks = [router.rpartition(".")[0] for router in routers]
    for name in (*routers, *blocks):
        attributes = vars(model.get_submodule(name))
        if "forward" in attributes and "_old_forward" not in attributes:
            rule = "must run the forward of its class, but another one was put in its place"
            remedy = "Undo that first (for kernels from the hub: load with use_kernels=False)."
            raise ConfigError("swap_routers.model", name, rule, remedy)


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
