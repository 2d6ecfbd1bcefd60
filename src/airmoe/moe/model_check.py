"""What stands at the door of functions that change a whole model."""

from __future__ import annotations

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
