"""`swap_ffn`: feed-forward networks of a Llama-like model become granular mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from airmoe.config import check_choice, check_count, config
from airmoe.errors import ConfigError
from airmoe.kernels.expert_tables import Activation
from airmoe.moe.ffn.dense import DenseFfn, decoder_of, find_ffns
from airmoe.moe.ffn.layer import connect
from airmoe.moe.ffn.saving import note_in_config
from airmoe.moe.ffn.settings import LayerSettings
from airmoe.moe.layer import MoELayer, PostNorm
from airmoe.routers import ExpertChoiceRouter, RouterConfig


@config
class FfnExperts:
    """What the experts of a swapped layer are; the router says how many there are."""

    label: ClassVar[str] = "swap_ffn.experts"

    expert_size: int = 1  # neurons per expert
    activation: Activation = "swiglu"

    def check(self) -> None:
        check_count(f"{self.label}.expert_size", self.expert_size)
        check_choice(f"{self.label}.activation", self.activation, Activation)


def swap_ffn(
    model: nn.Module,
    *,
    layers: Sequence[int],
    router: RouterConfig | None = None,
    experts: FfnExperts | None = None,
    post_norm: PostNorm = "layernorm",
) -> list[MoELayer]:
    """Put new experts in the place of the feed-forward networks of these decoder layers.

    Works for models of transformers whose `mlp` has gate_proj, up_proj, down_proj and act_fn:
    Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 4, OLMo2 and their like. `router` says how many experts
    there are and how they are chosen. They start at random and need training; their outputs pass a
    LayerNorm, as in the paper. The model is changed in place; the new layers are returned.

    Swap before an optimizer is made, adapters are added or the model is sharded. Hooks of the dense
    networks are gone with them; a pair of hooks on the decoder notes the padding mask, which its
    layers are not given. What cannot be done raises `ConfigError` before anything is changed.
    """
    experts = FfnExperts() if experts is None else experts
    if not isinstance(experts, FfnExperts):
        raise ConfigError(
            "swap_ffn.experts", experts, "must be an airmoe.FfnExperts", "Give FfnExperts(...)."
        )
    found = find_ffns(model, layers)
    if router is None:
        raise ConfigError(
            "swap_ffn.router",
            None,
            "must be given, because it says how many experts there are",
            f"Give for example AirRouter.Config.for_budget(dim={found[0].dim}, num_experts=65536, "
            "top_k=512).",
        )
    settings = LayerSettings(
        router=router,
        activation=experts.activation,
        expert_size=experts.expert_size,
        post_norm=post_norm,
    )
    for ffn in found:
        _check_router(ffn, router)
    std = getattr(_text_config(model), "initializer_range", 0.02)
    made = [_build(ffn, settings, std) for ffn in found]
    # Nothing can fail from here on.
    for ffn, layer in zip(found, made, strict=True):
        ffn.layer.mlp = layer
    connect(decoder_of(model))
    note_in_config(model, {ffn.index: settings.to_dict() for ffn in found})
    return made


@torch.no_grad()
def start_experts(layer: MoELayer, std: float) -> None:
    """Experts start like the other matrices of the model: the norm after them sets their scale."""
    for weight in layer.experts.parameters():
        nn.init.normal_(weight, std=std)


def _check_router(ffn: DenseFfn, router: RouterConfig) -> None:
    if router.dim != ffn.dim:
        raise ConfigError(
            "swap_ffn.router.dim",
            router.dim,
            f"must be {ffn.dim}, the width of the model",
            f"Give dim={ffn.dim}.",
        )
    chooses = isinstance(router, ExpertChoiceRouter.Config)
    if chooses or getattr(router, "gate", None) == "expert_choice":
        raise ConfigError(
            "swap_ffn.router",
            "expert_choice",
            "must let tokens choose, because experts that choose see future tokens",
            "Take another router or gate.",
        )


def _build(ffn: DenseFfn, settings: LayerSettings, std: float) -> MoELayer:
    """The new layer, ready to be put in place."""
    gate = ffn.module.gate_proj.weight
    layer = settings.build(gate.device).to(gate.dtype)
    start_experts(layer, std)
    return layer.train(ffn.module.training)


def _text_config(model: nn.Module) -> object:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return config if get_text_config is None else get_text_config()
