"""Telling routers that an optimizer has stepped."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from airmoe.errors import ConfigError
from airmoe.routers.base import Router

# How an optimizer is tracked, by the package whose loop is running.
REMEDIES = {
    "transformers.trainer": "Give the Trainer callbacks=[airmoe.TrackOptimizerCallback()].",
    "pytorch_lightning": "In on_train_start of your LightningModule call "
    "airmoe.track_optimizer(self, self.optimizers()).",
    "": "Call airmoe.track_optimizer(model, optimizer) with the optimizer you keep.",
}
REMEDIES["lightning.pytorch"] = REMEDIES["pytorch_lightning"]


def how_to_track() -> str:
    """The remedy for the loop that is running: a trainer's, or the user's own."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        for package in filter(None, REMEDIES):
            if f"{name}.".startswith(f"{package}."):
                return REMEDIES[package]
        frame = frame.f_back
    return REMEDIES[""]


@dataclass(frozen=True)
class Tracking:
    """What `track_optimizer` started, for these routers; `remove()` ends it.

    Routers that no optimizer reports to rebuild their lists in each forward. Routers that were
    tracked before stay so.
    """

    routers: list[Router]
    optimizer: weakref.ref[Optimizer]

    def remove(self) -> None:
        if (optimizer := self.optimizer()) is not None:
            for router in self.routers:
                router.unfollow(optimizer)


def track_optimizer(model: nn.Module, optimizer: Any) -> Tracking:
    """Mark the shortlists of every router in `model` as out of date after each optimizer step.

    Once per router and optimizer, however often it is called and with whatever part of the model.
    Where several optimizers step the same centroids, track each: every step of any of them counts,
    also towards `refresh_every`.

    The version counters of parameters are not enough: fused optimizers do not move them, nor do
    sharded parameters.
    Wrappers that keep the torch optimizer as `.optimizer` (Accelerate's) are looked through.
    """
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        rule = "must be a torch.optim.Optimizer or wrap one as `.optimizer`"
        remedy = "Pass the optimizer that steps the router's centroids."
        raise ConfigError("track_optimizer.optimizer", type(optimizer).__name__, rule, remedy)
    routers = _routers_of(model, optimizer)
    new = [router for router in routers if router.follow(optimizer)]
    return Tracking(new, weakref.ref(optimizer))


def _routers_of(model: nn.Module, optimizer: Optimizer) -> list[Router]:
    """The routers of a model, all of whose cached parameters this optimizer steps."""
    stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    found = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if not found:
        rule = "must contain a router"
        remedy = "Pass the model (or layer) that is trained."
        raise ConfigError("track_optimizer.model", type(model).__name__, rule, remedy)
    for name, router in found.items():
        trained = [id(weight) for weight in router.cached_parameters() if weight.requires_grad]
        if not stepped.issuperset(trained):
            rule = f"must hold the centroids of the router {name!r}"
            remedy = "Pass the optimizer that steps them, or the part of the model that it steps."
            raise ConfigError("track_optimizer.optimizer", type(optimizer).__name__, rule, remedy)
    return list(found.values())
