"""`swap_ffn`: granular mixtures of experts in place of dense feed-forward networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_count, config
from airmoe.errors import ConfigError
from airmoe.kernels.token_experts import Activation
from airmoe.moe import GranularExperts, MoELayer, MoEOutput
from airmoe.moe.layer import PostNorm
from airmoe.routers import ADD_YOURS, ROUTERS, ExpertChoiceRouter, RouterConfig

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


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
    layers: Iterable[int],
    router: RouterConfig,
    experts: FfnExperts | None = None,
    post_norm: PostNorm = "layernorm",
) -> list[MoELayer]:
    """Replace the feed-forward networks of these decoder layers with new mixtures of experts.

    Works for models of transformers whose `mlp` has gate_proj, up_proj, down_proj and act_fn:
    Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 4, OLMo2 and their like. `router` says how many experts
    there are and how they are chosen. They start at random and need training; by default they are
    single SwiGLU neurons and their outputs pass a LayerNorm, as in the paper. The model is changed
    in place; the new layers are returned.

    Swap before an optimizer is made, adapters are added or the model is sharded. Hooks on the
    replaced networks are lost. An impossible argument raises `ConfigError` before any change.
    """
    from airmoe.adapt.models import check_layers, check_model, config_of, plan_change

    check_model("swap_ffn.model", model)
    decoder = decoder_of(model)
    available = range(len(decoder.layers))
    numbers = check_layers("swap_ffn.layers", layers, "decoder layer", available)
    networks = [_check_network(number, decoder.layers[number]) for number in numbers]
    _check_router(router, networks[0].gate_proj.in_features)
    experts = FfnExperts() if experts is None else experts
    if not isinstance(experts, FfnExperts):
        rule = "must be an airmoe.FfnExperts"
        raise ConfigError("swap_ffn.experts", experts, rule, "Give FfnExperts(...).")
    check_choice("swap_ffn.post_norm", post_norm, PostNorm)
    settings: dict[str, Any] = {
        "router": {"name": _router_name(router), **asdict(router)},
        "experts": asdict(experts),
        "post_norm": post_norm,
    }
    made: dict[int, MoELayer] = {}
    for number, network in zip(numbers, networks, strict=True):
        weight = network.gate_proj.weight
        with torch.device(weight.device):
            layer = _new_layer(model, settings)
        made[number] = layer.to(weight.dtype).train(network.training)
    old = config_of(model, networks, "swap_ffn.model")
    saved = {**(getattr(old, "airmoe_ffn", None) or {}), **{str(n): settings for n in numbers}}
    change = plan_change(model, old, airmoe_ffn=saved)
    # Nothing can fail from here on.
    _put_layers(decoder, made)
    change()
    return [*made.values()]


def build_saved(model: nn.Module, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the layers that a config lists into a model that was just built from it."""
    made = {int(number): _new_layer(model, settings) for number, settings in layers.items()}
    _put_layers(decoder_of(model), made)


def _new_layer(model: Any, settings: Mapping[str, Any]) -> SwappedFfn:
    """A layer with starting values, on torch's default device and in its default dtype.

    Experts start like the other matrices of the model: the norm after them sets their scale.
    """
    values = dict(settings["router"])
    name = values.pop("name")
    if name not in ROUTERS:
        field, known = "airmoe_ffn.router.name", ", ".join(ROUTERS)
        raise ConfigError(field, name, f"must be one of {known}", ADD_YOURS)
    router, form = ROUTERS[name].Config(**values), FfnExperts(**settings["experts"])
    experts = GranularExperts(router.num_experts, router.dim, form.activation, form.expert_size)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for weight in experts.parameters():
        nn.init.normal_(weight, std=getattr(config, "initializer_range", 0.02))
    return SwappedFfn(router.build(), experts, settings["post_norm"])


def decoder_of(model: Any) -> Any:
    """The part of a Hugging Face model that runs the decoder layers, with these in `layers`."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        rule = (
            "must be a decoder with its layers in `layers`, like Llama, Mistral, Qwen2, Qwen3, "
            "Gemma or OLMo2 of transformers"
        )
        raise ConfigError("swap_ffn.model", type(model).__name__, rule, "Pass such a model.")
    return decoder


def _router_name(router: object) -> str | None:
    """The name under which this kind of settings is known."""
    return next((name for name, kind in ROUTERS.items() if type(router) is kind.Config), None)


def _check_router(router: RouterConfig, dim: int) -> None:
    if _router_name(router) is None:
        raise ConfigError(
            "swap_ffn.router",
            type(router).__qualname__,
            f"must be the Config of a router in airmoe.ROUTERS ({', '.join(ROUTERS)}), so that the "
            "model can be loaded again",
            f"Give for example airmoe.AirRouter.Config.for_budget(dim={dim}, num_experts=65536, "
            "top_k=512), or register the router.",
        )
    if router.dim != dim:
        rule = f"must be {dim}, the width of the model"
        raise ConfigError("swap_ffn.router.dim", router.dim, rule, f"Give dim={dim}.")
    chooses = isinstance(router, ExpertChoiceRouter.Config)
    if chooses or getattr(router, "gate", None) == "expert_choice":
        rule = "must let tokens choose, because experts that choose see future tokens"
        raise ConfigError("swap_ffn.router", "expert_choice", rule, "Take another router or gate.")


def _check_network(number: int, layer: nn.Module) -> Any:
    """The dense network of this decoder layer."""
    field = f"swap_ffn.layers[{number}]"
    network: Any = getattr(layer, "mlp", None)
    if isinstance(network, MoELayer):
        remedy = "Leave it out, or start from the dense model."
        raise ConfigError(field, "MoELayer", "is swapped already", remedy)
    children = dict(network.named_children()) if isinstance(network, nn.Module) else {}
    if {*children, "act_fn"} != {*PROJECTIONS, "act_fn"} or not hasattr(network, "act_fn"):
        given = "no `mlp`" if network is None else type(network).__name__
        rule = "must have an `mlp` made of gate_proj, up_proj, down_proj and act_fn only"
        remedy = "Leave this layer out; mixture-of-experts layers keep theirs (see swap_routers)."
        raise ConfigError(field, given, rule, remedy)
    for name in PROJECTIONS:
        kind, weight = type(children[name]), children[name].weight
        if kind is not nn.Linear or hasattr(weight, "full_tensor") or weight.dtype not in DTYPES:
            raise ConfigError(
                f"{field}.{name}",
                kind.__name__ if kind is not nn.Linear else weight.dtype,
                "must be a plain torch.nn.Linear in float16, bfloat16, float32 or float64, neither "
                "quantised nor sharded nor wrapped by an adapter",
                "Load without quantisation; swap before adding adapters and sharding.",
            )
    return network


# -- the new layer --------------------------------------------------------------------------------


class SwappedFfn(MoELayer):
    """A MoELayer that leaves padding out and doesn't learn from text the model generates.

    Decoders tell their layers neither, so hooks on the decoder do.
    """

    attention_mask: Tensor | None = None  # [B, positions], those in the cache come first
    has_cache = False  # the model is generating token by token

    def forward_with_routing(
        self, x: Tensor, mask: Tensor | None = None, *, learn: bool = True
    ) -> MoEOutput:
        mask = self._mask_of(x) if mask is None else mask
        return super().forward_with_routing(x, mask, learn=learn and not self.has_cache)

    def _mask_of(self, x: Tensor) -> Tensor | None:
        """x [B, L, D] -> [B, L] bool, True for real tokens; None where no mask fits."""
        mask = self.attention_mask
        if mask is None or x.ndim != 3 or len(mask) != len(x) or mask.shape[1] < x.shape[1]:
            return None
        return mask[:, mask.shape[1] - x.shape[1] :].to(x.device) != 0


def _put_layers(decoder: Any, layers: Mapping[int, MoELayer]) -> None:
    """Put new layers in place of the networks."""
    for number, layer in layers.items():
        decoder.layers[number].mlp = layer
    if _tell_layers not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_tell_layers, with_kwargs=True)
        decoder.register_forward_hook(_clear_layers, always_call=True)


def _tell_layers(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if not isinstance(mask, Tensor) or mask.ndim != 2:  # others say which token attends to which
        mask = None
    cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
    for layer in decoder.layers:
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, SwappedFfn):
            mlp.attention_mask, mlp.has_cache = mask, cache is not None


def _clear_layers(decoder: Any, _args: Any, _output: Any) -> None:
    _tell_layers(decoder, (), {})
