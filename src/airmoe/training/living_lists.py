"""Shortlists that live several steps (`refresh_every`), in a checkpoint between two of them.

What they were built from is gone, so a resumed run could not build them again.
"""

from __future__ import annotations

from torch import Tensor, nn

from airmoe.routers import AirRouter

LISTS = "shortlists.safetensors"


def living_lists(model: nn.Module) -> dict[str, Tensor]:
    """`router/tensor` -> what its lists are; empty where all are due, as after every step of 1."""
    return {
        f"{name}/{key}": tensor.cpu()
        for name, module in model.named_modules()
        if isinstance(module, AirRouter)
        for key, tensor in module.lists_state().items()
    }


def restore_lists(model: nn.Module, saved: dict[str, Tensor]) -> None:
    for name, module in model.named_modules():
        prefix = f"{name}/"
        own = {
            key.removeprefix(prefix): tensor
            for key, tensor in saved.items()
            if key.startswith(prefix)
        }
        if isinstance(module, AirRouter) and own:
            module.restore_lists(own)
