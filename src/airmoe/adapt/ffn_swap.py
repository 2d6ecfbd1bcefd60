"""`swap_ffn`: granular mixtures of experts in the place of dense feed-forward networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from airmoe.adapt.checks import check_available, check_model, check_weights, layer_numbers
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


@config
class FfnSettings:
    """A layer that replaces a feed-forward network, as the model's config keeps it."""

    label: ClassVar[str] = "swap_ffn"

    router: RouterConfig
    experts: FfnExperts
    post_norm: PostNorm

    def check(self) -> None:
        if not isinstance(self.experts, FfnExperts):
            rule = "must be an airmoe.FfnExperts"
            raise ConfigError("swap_ffn.experts", self.experts, rule, "Give FfnExperts(...).")
        check_choice("swap_ffn.post_norm", self.post_norm, PostNorm)
        _router_name(self.router)

    def build(self, std: float) -> SwappedFfn:
        """The layer with starting values, on torch's default device and in its default dtype.

        Experts start like the other matrices of the model: the norm after them sets their scale.
        """
        router, form = self.router, self.experts
        experts = GranularExperts(router.num_experts, router.dim, form.activation, form.expert_size)
        with torch.no_grad():
            for weight in experts.parameters():
                nn.init.normal_(weight, std=std)
        return SwappedFfn(router.build(), experts, self.post_norm)

    def to_dict(self) -> dict[str, Any]:
        router = {"name": _router_name(self.router), **asdict(self.router)}
        return {"router": router, "experts": asdict(self.experts), "post_norm": self.post_norm}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        router = dict(values["router"])
        name = router.pop("name")
        if name not in ROUTERS:
            field, known = "airmoe_ffn.router.name", ", ".join(ROUTERS)
            raise ConfigError(field, name, f"must be one of {known}", ADD_YOURS)
        return cls(
            router=ROUTERS[name].Config(**router),
            experts=FfnExperts(**values["experts"]),
            post_norm=values["post_norm"],
        )


def swap_ffn(
    model: nn.Module,
    *,
    layers: Iterable[int],
    router: RouterConfig | None = None,
    experts: FfnExperts | None = None,
    post_norm: PostNorm = "layernorm",
) -> list[MoELayer]:
    """Replace the feed-forward networks of these decoder layers by new mixtures of experts.

    Works for models of transformers whose `mlp` has gate_proj, up_proj, down_proj and act_fn:
    Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 4, OLMo2 and their like. `router` says how many experts
    there are and how they are chosen. They start at random and need training; their outputs pass a
    LayerNorm, as in the paper. The model is changed in place; the new layers are returned.

    Swap before an optimizer is made, adapters are added or the model is sharded. Hooks on the
    replaced networks are lost. An impossible argument raises `ConfigError` before any change.
    """
    from airmoe.adapt.models import owner_of, plan_swap

    check_model("swap_ffn.model", model)
    check_weights("swap_ffn.model", model)
    decoder_layers = layers_of(model)
    numbers = layer_numbers("swap_ffn.layers", layers)
    check_available("swap_ffn.layers", numbers, "decoder layer", range(len(decoder_layers)))
    networks = [_check_network(number, decoder_layers[number]) for number in numbers]
    dim = networks[0].gate_proj.in_features
    if router is None:
        raise ConfigError(
            "swap_ffn.router",
            None,
            "must be given, because it says how many experts there are",
            f"Give for example AirRouter.Config.for_budget(dim={dim}, num_experts=65536, "
            "top_k=512).",
        )
    settings = FfnSettings(
        router=router, experts=FfnExperts() if experts is None else experts, post_norm=post_norm
    )
    _check_router(dim, router)
    std = _initializer_range(model)
    made: list[MoELayer] = [_build_like(network, settings, std) for network in networks]
    whole = owner_of(model, networks, "swap_ffn.model")
    change = plan_swap(model, whole, ffn=dict.fromkeys(numbers, settings))
    # Nothing can fail from here on.
    for number, layer in zip(numbers, made, strict=True):
        decoder_layers[number].mlp = layer
    share_inputs(decoder_of(model))
    change()
    return made


def build_saved(model: nn.Module, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the layers that a config lists into a model that was just built from it."""
    decoder_layers, std = layers_of(model), _initializer_range(model)
    for number, values in layers.items():
        decoder_layers[int(number)].mlp = FfnSettings.from_dict(values).build(std)
    share_inputs(decoder_of(model))


def decoder_of(model: nn.Module) -> Any:
    """The part of a Hugging Face model that runs the decoder layers."""
    get_decoder = getattr(model, "get_decoder", None)
    return model if get_decoder is None else get_decoder()


def layers_of(model: nn.Module) -> Any:
    """The decoder layers of a Hugging Face model."""
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            "swap_ffn.model",
            type(model).__name__,
            "must be a decoder with its layers in `layers`, like Llama, Mistral, Qwen2, Qwen3, "
            "Gemma or OLMo2 of transformers",
            "Pass such a model.",
        )
    return layers


def _build_like(network: Any, settings: FfnSettings, std: float) -> SwappedFfn:
    weight = network.gate_proj.weight
    with torch.device(weight.device):
        layer = settings.build(std)
    layer.to(weight.dtype).train(network.training)
    return layer


def _initializer_range(model: nn.Module) -> float:
    config = getattr(model, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    config = config if get_text_config is None else get_text_config()
    return getattr(config, "initializer_range", 0.02)


def _router_name(router: object) -> str:
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


def _check_router(dim: int, router: RouterConfig) -> None:
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
        raise ConfigError(
            field, "MoELayer", "is swapped already", "Leave it out, or start from the dense model."
        )
    children = dict(network.named_children()) if isinstance(network, nn.Module) else {}
    has_act = callable(getattr(network, "act_fn", None))
    if {*children, "act_fn"} != {*PROJECTIONS, "act_fn"} or not has_act:
        raise ConfigError(
            field,
            "no `mlp`" if network is None else type(network).__name__,
            "must have an `mlp` made of gate_proj, up_proj, down_proj and act_fn only",
            "Leave this layer out; mixture-of-experts layers keep theirs (see swap_routers).",
        )
    for name in PROJECTIONS:
        _check_projection(f"{field}.{name}", children[name])
    return network


def _check_projection(field: str, projection: Any) -> None:
    value: Any = None
    if type(projection) is not nn.Linear:
        value = type(projection).__name__
    elif projection.weight.dtype not in DTYPES:
        value = projection.weight.dtype
    elif hasattr(projection.weight, "full_tensor"):
        value = "sharded"
    if value is not None:
        raise ConfigError(
            field,
            value,
            "must be a plain torch.nn.Linear in float16, bfloat16, float32 or float64, neither "
            "quantised nor sharded nor wrapped by an adapter",
            "Load without quantisation; swap before adding adapters and sharding.",
        )


# -- the new layer ---


class DecoderInputs:
    """The padding mask and cache of the current forward, which decoders don't pass to their layers.

    Hooks on the decoder set both before its forward and clear them after it.
    """

    def __init__(self) -> None:
        self._mask: Tensor | None = None  # [B, positions], those in the cache come first
        self.has_cache = False  # the model is generating token by token

    def __getstate__(self) -> dict[str, object]:
        return vars(DecoderInputs())  # a copy of the model has inputs of its own

    def watch(self, decoder: nn.Module) -> None:
        decoder.register_forward_pre_hook(self._set, with_kwargs=True)
        decoder.register_forward_hook(self._clear, always_call=True)

    def mask_of(self, x: Tensor) -> Tensor | None:
        """x [B, L, D] -> [B, L] bool, True for real tokens; None where no mask fits."""
        mask = self._mask
        if mask is None or x.ndim != 3:
            return None
        batch, length, _ = x.shape
        if mask.shape[0] != batch or mask.shape[1] < length:
            return None
        return mask[:, mask.shape[1] - length :].to(x.device) != 0

    def _set(self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        # Masks with more dimensions say which token attends to which.
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
        self.has_cache = cache is not None

    def _clear(self, _decoder: nn.Module, _args: Any, _output: Any) -> None:
        self._mask, self.has_cache = None, False


class SwappedFfn(MoELayer):
    """A MoELayer that leaves padding out and doesn't learn from text the model generates."""

    inputs: DecoderInputs | None = None

    def forward_with_routing(
        self, x: Tensor, mask: Tensor | None = None, *, learn: bool = True
    ) -> MoEOutput:
        inputs = self.inputs
        if inputs is not None:
            mask = inputs.mask_of(x) if mask is None else mask
            learn = learn and not inputs.has_cache
        return super().forward_with_routing(x, mask, learn=learn)


def share_inputs(decoder: nn.Module) -> None:
    """Connect all swapped layers of a decoder, also those of earlier calls, to its inputs."""
    layers = [module for module in decoder.modules() if isinstance(module, SwappedFfn)]
    known = [layer.inputs for layer in layers if layer.inputs is not None]
    if not known:
        known = [DecoderInputs()]
        known[0].watch(decoder)
    for layer in layers:
        layer.inputs = known[0]
