"""Optimizer state by parameter name, whole, so that any number of processes can take it up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<entry>` -> tensor on the CPU. Gathers what is sharded: call on all ranks."""
    entries = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            entries[f"{name}/{key}"] = full_tensor(torch.as_tensor(value)).detach().cpu().clone()
    return entries


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, entries: dict[str, Tensor]
) -> None:
    """Give every parameter its entries back, sharded as the parameter is."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for path, value in entries.items():
        name, _, key = path.rpartition("/")
        by_name.setdefault(name, {})[key] = value
    parameters = dict(model.named_parameters())
    if unknown := sorted(by_name.keys() - parameters.keys()):
        raise ConfigError(
            "checkpoint.optimizer",
            unknown[0],
            "must belong to a parameter of this model",
            "The checkpoint is of another model: start a new run.",
        )
    for name, saved in by_name.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            key: _placed(key, value, parameter) for key, value in saved.items()
        }


def _placed(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    if value.shape != parameter.shape:  # the step counter: fused AdamW keeps it on the device
        return value.to(parameter.device) if parameter.is_cuda else value.clone()
    if isinstance(parameter, DTensor):
        value = value.to(parameter.device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.to(device=parameter.device).clone()
