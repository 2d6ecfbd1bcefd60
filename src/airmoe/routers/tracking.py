"""Telling routers that an optimizer has stepped."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from airmoe.errors import ConfigError
from airmoe.routers.base import Router


class Tracking:
    """The live connection; `remove()` ends it and the routers fall back to rebuilding each time."""

    def __init__(self, routers: list[Router], hook: Any) -> None:
        self._routers, self._hook = routers, hook

    def remove(self) -> None:
        self._hook.remove()
        for router in self._routers:
            router.set_tracked(None)
            router.on_parameters_changed()


def track_optimizer(model: nn.Module, optimizer: Any) -> Tracking:
    """After each step of `optimizer`, mark the shortlists of every router in `model` dirty.

    Parameter versions would not do: fused optimizers and sharded parameters do not move them.
    Wrappers that keep the torch optimizer as `.optimizer` (Accelerate's) are looked through.
    """
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "track_optimizer.optimizer",
            type(optimizer).__name__,
            "must be a torch.optim.Optimizer or wrap one as `.optimizer`",
            "Pass the optimizer that steps the router's centroids.",
        )
    routers = _routers_of(model, optimizer)

    def after_step(*_: Any) -> None:
        for router in routers:
            router.on_optimizer_step()

    hook = optimizer.register_step_post_hook(after_step)
    for router in routers:
        router.set_tracked(optimizer)
        router.on_parameters_changed()
    return Tracking(routers, hook)


def _routers_of(model: nn.Module, optimizer: Optimizer) -> list[Router]:
    """The routers of a model, all of whose cached parameters this optimizer steps."""
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    found = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if not found:
        raise ConfigError(
            "track_optimizer.model",
            type(model).__name__,
            "must contain a router",
            "Pass the model (or layer) that is trained.",
        )
    for name, router in found.items():
        trained = [id(weight) for weight in router.cached_parameters() if weight.requires_grad]
        if not stepped.issuperset(trained):
            raise ConfigError(
                "track_optimizer.optimizer",
                type(optimizer).__name__,
                f"must hold the centroids of the router {name!r}",
                "Pass the optimizer that steps them, or the part of the model that it steps.",
            )
    return list(found.values())
