"""What every function here asks of a model before it changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from airmoe.errors import ConfigError


def check_model(field: str, model: object) -> None:
    """A model that was built or loaded, not its name."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            field,
            model if isinstance(model, str) else type(model).__name__,
            "must be a model",
            "Load it first: transformers.AutoModelForCausalLM.from_pretrained(...).",
        )


def check_weights(field: str, model: nn.Module) -> None:
    """Refuse weights that are offloaded, not loaded yet, or quantised."""
    if any(weight.is_meta for weight in model.parameters()):
        rule = "must have its weights in memory"
        remedy = "Load the model first (without offloading), then swap."
        raise ConfigError(field, "weights on the meta device", rule, remedy)
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "config")]
    quantized = any(
        getattr(part, "is_quantized", False)
        or getattr(part, "hf_quantizer", None) is not None
        or getattr(part.config, "quantization_config", None) is not None
        for part in parts
    ) or any(not weight.is_floating_point() for weight in model.parameters())
    if quantized:
        rule = "must have floating-point weights"
        remedy = "Load it without quantisation (or call model.dequantize()), then swap."
        raise ConfigError(field, "a quantised model", rule, remedy)


def layer_numbers(field: str, layers: object) -> list[int]:
    """`layers` as a list of ints, which is what a config.json can hold."""
    numbers: list[Any] = [*layers] if isinstance(layers, Iterable) else [layers]
    wrong = [number for number in numbers if type(number) is not int]
    if wrong or not isinstance(layers, Iterable):
        rule = "must be a list of whole numbers"
        remedy = "Give ints, for example layers=[3, 4]."
        raise ConfigError(field, wrong[0] if wrong else layers, rule, remedy)
    if not numbers or len(set(numbers)) != len(numbers):
        rule = "must name each layer once, and at least one"
        raise ConfigError(field, numbers, rule, "Remove repetitions and give one number or more.")
    return numbers


def check_available(field: str, layers: Sequence[int], kind: str, available: Sequence[int]) -> None:
    """Every number must be that of a decoder layer of this kind."""
    for layer in layers:
        if layer not in available:
            rule = f"must be the number of a {kind}: {', '.join(map(str, available))}"
            remedy = "Choose among these; the first decoder layer is 0."
            raise ConfigError(field, layer, rule, remedy)
