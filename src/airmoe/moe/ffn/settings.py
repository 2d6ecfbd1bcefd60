"""What one swapped layer is made of, also as plain values that fit a config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import torch

from airmoe.config import check_choice, check_count, config
from airmoe.errors import ConfigError
from airmoe.kernels.expert_tables import Activation
from airmoe.moe.experts import GranularExperts
from airmoe.moe.ffn.layer import SwappedFfn
from airmoe.moe.layer import PostNorm
from airmoe.routers import ROUTERS, RouterConfig
from airmoe.routers.registry import ADD_YOURS


@config
class LayerSettings:
    """A mixture-of-experts layer in the place of a feed-forward network."""

    label = "swap_ffn"

    router: RouterConfig
    activation: Activation
    expert_size: int
    post_norm: PostNorm

    def check(self) -> None:
        check_choice("swap_ffn.experts.activation", self.activation, Activation)
        check_count("swap_ffn.experts.expert_size", self.expert_size)
        check_choice("swap_ffn.post_norm", self.post_norm, PostNorm)
        router_name(self.router)

    def build(self, device: torch.device | None = None) -> SwappedFfn:
        """The layer with starting values, on torch's default device if none is named."""
        router = self.router
        with torch.device(torch.get_default_device() if device is None else device):
            size = (router.num_experts, router.dim)
            experts = GranularExperts(*size, self.activation, self.expert_size)
            return SwappedFfn(router.build(), experts, self.post_norm)

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        router = {"name": router_name(self.router), **dataclasses.asdict(self.router)}
        return values | {"router": router}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        router = dict(values["router"])
        name = router.pop("name")
        check_choice_of("airmoe_ffn.router.name", name, list(ROUTERS))
        return cls(**{**values, "router": ROUTERS[name].Config(**router)})


def router_name(router: object) -> str:
    """The name under which this kind of settings is known."""
    for name, kind in ROUTERS.items():
        if type(router) is kind.Config:
            return name
    raise ConfigError(
        "swap_ffn.router",
        type(router).__qualname__,
        f"must be the Config of a router in airmoe.ROUTERS ({', '.join(ROUTERS)}), so that the "
        "model can be loaded again",
        "Give for example airmoe.AirRouter.Config(...), or register the router.",
    )


def check_choice_of(field: str, value: object, options: list[str]) -> None:
    if value not in options:
        raise ConfigError(field, value, f"must be one of {', '.join(options)}", ADD_YOURS)
