"""`swap_ffn`: dense feed-forward networks of a Llama-like model become mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from airmoe.config import check_choice, check_count, check_flag, config
from airmoe.errors import ConfigError
from airmoe.kernels.expert_tables import Activation
from airmoe.moe.ffn.dense import (
    DenseFfn,
    check_takeable,
    check_untied,
    decoder_of,
    dense_activation,
    find_ffns,
)
from airmoe.moe.ffn.layer import connect
from airmoe.moe.ffn.saving import note_in_config
from airmoe.moe.ffn.settings import LayerSettings
from airmoe.moe.layer import MoELayer, PostNorm
from airmoe.routers import AirRouter, ExpertChoiceRouter, RouterConfig
from airmoe.routers.centroids import CentroidRouter


@config
class FfnExperts:
    """What the experts of a swapped layer are; how many there are says the router.

    `activation` None means swiglu, and with from_dense=True that of the dense network.
    """

    label: ClassVar[str] = "swap_ffn.experts"

    expert_size: int = 1  # neurons per expert
    activation: Activation | None = None

    def check(self) -> None:
        check_count(f"{self.label}.expert_size", self.expert_size)
        if self.activation is not None:
            check_choice(f"{self.label}.activation", self.activation, Activation)


def swap_ffn(
    model: nn.Module,
    *,
    layers: Sequence[int],
    router: RouterConfig | None = None,
    experts: FfnExperts | None = None,
    from_dense: bool = False,
    post_norm: PostNorm | None = None,
) -> list[MoELayer]:
    """Replace the feed-forward networks of these decoder layers, in place; returns the new layers.

    Models of transformers whose `mlp` is down_proj(act_fn(gate_proj(x)) * up_proj(x)): Llama,
    Mistral, Qwen2, Qwen3, Gemma 1 to 4, OLMo2 and their like.

    New experts (`from_dense=False`) start at random and want training: `router` says how many and
    how they are chosen, outputs pass a LayerNorm, as in the paper.

    With `from_dense=True` each neuron (or each group of `expert_size` neurons) of the dense network
    becomes an expert with the same weights; the chosen ones weigh 1 (`gate="binary"`) and there is
    no norm after them, so that the outputs with K = E are those of the dense model. `router` None
    means `default_router`. Gate and up weights keep their memory. The centroids, which start at the
    neurons' gate rows, get no gradient and are frozen. AIR scores every expert until it is
    calibrated (`airmoe.calibrate`) or trained.

    Swap before an optimizer is made, adapters are added or the model is sharded. Hooks of the dense
    networks are gone with them; a pair of hooks on the decoder notes the padding mask, so that no
    codebook learns from padding. Impossible wishes raise `ConfigError` before anything is changed.
    """
    check_flag("swap_ffn.from_dense", from_dense)
    experts = FfnExperts() if experts is None else experts
    if not isinstance(experts, FfnExperts):
        raise ConfigError(
            "swap_ffn.experts", experts, "must be an airmoe.FfnExperts", "Give FfnExperts(...)."
        )
    found = find_ffns(model, layers)
    if from_dense:
        check_untied(model, found)
    wish = _from_dense if from_dense else _from_nothing
    wanted = [wish(ffn, router, experts, post_norm) for ffn in found]
    made = [_build(ffn, one, from_dense) for ffn, one in zip(found, wanted, strict=True)]
    if not from_dense:
        std = getattr(_text_config(model), "initializer_range", 0.02)
        for layer in made:
            start_experts(layer, std)
    # Nothing can fail from here on.
    for ffn, layer in zip(found, made, strict=True):
        ffn.layer.mlp = layer
    connect(decoder_of(model))
    note_in_config(
        model, {ffn.index: one.to_dict() for ffn, one in zip(found, wanted, strict=True)}
    )
    return made


def default_router(dim: int, num_experts: int) -> AirRouter.Config:
    """AIR over the neurons of a dense network: a quarter of them, from shortlists of a half.

    Many codewords, because a dense network's neurons were never asked to agree with a codebook
    (docs/sparsify.md has what was measured).
    """
    top_k = max(1, num_experts // 4)
    return AirRouter.Config(
        dim=dim,
        num_experts=num_experts,
        top_k=top_k,
        num_codewords=max(1, min(256, num_experts // 8)),
        shortlist_size=max(top_k, num_experts // 2),
        normalize_centroids=False,
        gate="binary",
    )


@torch.no_grad()
def start_experts(layer: MoELayer, std: float) -> None:
    """Experts start like the other matrices of the model: the norm after them sets their scale."""
    for weight in layer.experts.parameters():
        nn.init.normal_(weight, std=std)


def _from_nothing(
    ffn: DenseFfn, router: RouterConfig | None, experts: FfnExperts, post_norm: PostNorm | None
) -> LayerSettings:
    if router is None:
        raise ConfigError(
            "swap_ffn.router",
            None,
            "must be given when experts are new, because it says how many there are",
            f"Give for example AirRouter.Config.for_budget(dim={ffn.dim}, num_experts=65536, "
            "top_k=512), or from_dense=True.",
        )
    settings = LayerSettings(
        router=router,
        activation=experts.activation or "swiglu",
        expert_size=experts.expert_size,
        post_norm="layernorm" if post_norm is None else post_norm,
    )
    _check_router(ffn, router)
    return settings


def _from_dense(
    ffn: DenseFfn, router: RouterConfig | None, experts: FfnExperts, post_norm: PostNorm | None
) -> LayerSettings:
    activation = dense_activation(ffn)
    check_takeable(ffn)
    if experts.activation not in (None, activation):
        raise ConfigError(
            "swap_ffn.experts.activation",
            experts.activation,
            f"must be {activation!r} with from_dense=True, the activation of the dense network",
            "Leave it out.",
        )
    if post_norm not in (None, "none"):
        raise ConfigError(
            "swap_ffn.post_norm",
            post_norm,
            "must be 'none' with from_dense=True, because a norm would change the outputs",
            "Leave it out.",
        )
    if ffn.num_neurons % experts.expert_size:
        raise ConfigError(
            "swap_ffn.experts.expert_size",
            experts.expert_size,
            f"must divide {ffn.num_neurons}, the neurons of layer {ffn.index}",
            "Choose a divisor; 1 makes an expert of each neuron.",
        )
    num_experts = ffn.num_neurons // experts.expert_size
    router = default_router(ffn.dim, num_experts) if router is None else router
    settings = LayerSettings(
        router=router, activation=activation, expert_size=experts.expert_size, post_norm="none"
    )
    _check_router(ffn, router)
    if router.num_experts != num_experts:
        raise ConfigError(
            "swap_ffn.router.num_experts",
            router.num_experts,
            f"must be {num_experts} with from_dense=True, the experts that layer {ffn.index} gives",
            f"Give num_experts={num_experts}.",
        )
    if getattr(router, "gate", None) != "binary":
        raise ConfigError(
            "swap_ffn.router.gate",
            getattr(router, "gate", type(router).label),
            "must be 'binary' with from_dense=True, because neurons are not weighed",
            'Give AirRouter.Config or TopKRouter.Config with gate="binary".',
        )
    return settings


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


def _build(ffn: DenseFfn, settings: LayerSettings, from_dense: bool) -> MoELayer:
    """The new layer, ready to be put in place."""
    gate, _, _ = ffn.weights
    layer = settings.build(gate.device).to(gate.dtype)
    if from_dense:
        _take_over(layer, ffn)
    layer.train(ffn.module.training)
    return layer


@torch.no_grad()
def _take_over(layer: MoELayer, ffn: DenseFfn) -> None:
    """Give the experts the weights of the dense network, and the router centroids to match.

    A neuron adds act(g.h) (u.h) d, and act grows with g.h where it is not near 0: so the gate row g
    is the centroid, and of a group of neurons the mean. Scaled by |u| |d|, or projected onto the
    sphere, it ranked the neurons of a trained model slightly worse (docs/sparsify.md).
    """
    experts, router = layer.experts, layer.router
    gate, up, down = ffn.weights
    taken = {"gate": gate, "up": up, "down": down.T}
    for name, weight in taken.items():
        rows = weight.detach().reshape(experts.weight_shape()).contiguous()
        setattr(experts, name, nn.Parameter(rows, requires_grad=weight.requires_grad))
    assert isinstance(router, CentroidRouter)
    rows = gate.reshape(experts.num_experts, -1, experts.dim).mean(1)
    router.centroids.copy_(rows)
    router.on_parameters_changed()


def _text_config(model: nn.Module) -> object:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    return config if get_text_config is None else get_text_config()
