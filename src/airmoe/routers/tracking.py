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
            router.set_tracked(False)
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
            router.on_parameters_changed()

    hook = optimizer.register_step_post_hook(after_step)
    for router in routers:
        router.set_tracked(True)
        router.on_parameters_changed()
    return Tracking(routers, hook)


def _routers_of(model: nn.Module, optimizer: Optimizer) -> list[Router]:
    """The routers whose trainable parameters this optimizer steps (all of them, or nobody's)."""
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, Router):
            continue
        trained = [id(weight) for weight in module.parameters() if weight.requires_grad]
        if not stepped.issuperset(trained):
            raise ConfigError(
                "track_optimizer.optimizer",
                type(optimizer).__name__,
                f"must hold the trainable parameters of the router {name!r}",
                "Pass the optimizer that steps them, or the part of the model that it steps.",
            )
        found.append(module)
    return found
