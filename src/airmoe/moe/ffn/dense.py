"""The dense feed-forward networks of Llama-like models: where they are and what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from airmoe.errors import ConfigError
from airmoe.moe.layer import MoELayer
from airmoe.moe.model_check import check_model

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PARTS = ("act_fn", "down_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class DenseFfn:
    """down_proj(act_fn(gate_proj(x)) * up_proj(x)) of one decoder layer."""

    index: int
    layer: nn.Module  # the decoder layer that calls `module`
    module: Any

    @property
    def dim(self) -> int:
        return self.module.gate_proj.in_features


def find_ffns(model: nn.Module, layers: Sequence[int]) -> list[DenseFfn]:
    """The networks of these decoder layers; nothing is changed, whatever is refused."""
    _check_model(model)
    decoder_layers = layers_of(model)
    _check_indices(layers, len(decoder_layers))
    found = []
    for index in layers:
        layer = decoder_layers[index]
        module = getattr(layer, "mlp", None)
        _check_module(f"swap_ffn.layers[{index}]", module)
        found.append(DenseFfn(index, layer, module))
    return found


def decoder_of(model: nn.Module) -> Any:
    """The part of a Hugging Face model that runs the decoder layers."""
    get_decoder = getattr(model, "get_decoder", None)
    return model if get_decoder is None else get_decoder()


def layers_of(model: nn.Module) -> nn.ModuleList:
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


def _check_model(model: nn.Module) -> None:
    check_model("swap_ffn.model", model)
    if any(weight.device.type == "meta" for weight in model.parameters()):
        raise ConfigError(
            "swap_ffn.model",
            "on the meta device",
            "must have its weights in memory, none of them offloaded",
            "Load the weights first; a swapped model is loaded with airmoe.load_swapped_ffn.",
        )
    quantizer = getattr(model, "hf_quantizer", None)
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantizer is not None or settings is not None or getattr(model, "is_quantized", False):
        raise ConfigError(
            "swap_ffn.model",
            "quantised",
            "must have floating-point weights, which experts compute with",
            "Load the model without quantization, or call model.dequantize() where it has that.",
        )


def _check_indices(layers: Sequence[int], count: int) -> None:
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ConfigError(
            "swap_ffn.layers", layers, "must list at least one layer", "Give for example [2, 5]."
        )
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise ConfigError(
                "swap_ffn.layers",
                index,
                f"must be a whole number from 0 to {count - 1}, because the model has {count} "
                "decoder layers",
                "Name layers by their place, the first is 0.",
            )
    if len(set(layers)) != len(layers):
        raise ConfigError(
            "swap_ffn.layers", list(layers), "must name each layer once", "Remove the repetition."
        )


def _check_module(field: str, module: object) -> None:
    if isinstance(module, MoELayer):
        raise ConfigError(
            field, "MoELayer", "is swapped already", "Leave it out, or start from the dense model."
        )
    names = [name for name, _ in module.named_children()] if isinstance(module, nn.Module) else []
    has_act = callable(getattr(module, "act_fn", None))
    if sorted({*names, "act_fn"}) != list(PARTS) or not has_act:
        raise ConfigError(
            field,
            "no `mlp`" if module is None else type(module).__name__,
            "must have an `mlp` made of gate_proj, up_proj, down_proj and act_fn only",
            "Leave this layer out; mixture-of-experts layers keep theirs (see swap_routers).",
        )
    for name in ("gate_proj", "up_proj", "down_proj"):
        _check_projection(f"{field}.{name}", getattr(module, name))


def _check_projection(field: str, projection: nn.Module) -> None:
    if type(projection) is not nn.Linear:
        raise ConfigError(
            field,
            type(projection).__name__,
            "must be a plain torch.nn.Linear, neither quantised nor wrapped by an adapter",
            "Swap first and add adapters afterwards; load without quantization.",
        )
    if projection.weight.dtype not in DTYPES:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(
            field, projection.weight.dtype, f"must be one of {listed}", "Load without quantization."
        )
    if hasattr(projection.weight, "full_tensor"):
        raise ConfigError(
            field, "sharded", "must be whole on its device", "Swap before the model is sharded."
        )
