"""What a run needs to go on besides its weights, as plain tensors: optimizer and random states."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError

OPTIMIZER = "optimizer.safetensors"
STEP = "step"
ENTRIES = ("exp_avg", "exp_avg_sq", STEP)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<entry>` -> tensor on the CPU. Gathers what is sharded: call on all ranks."""
    entries = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            entries[f"{name}/{key}"] = full_tensor(torch.as_tensor(value)).detach().cpu().clone()
    return entries


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, entries: dict[str, Tensor], *, may_be_new: bool = False
) -> None:
    """Give every parameter its entries back, sharded as the parameter is.

    All of them are checked first, because fused AdamW writes beyond a moment that is too short.
    `may_be_new`: there may be none at all, of an optimizer that skipped every step.
    """
    if may_be_new and not entries:
        return
    optimized = {id(one) for group in optimizer.param_groups for one in group["params"]}
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in optimized
    }
    wanted = {
        f"{name}/{key}": _shape_and_dtype(key, parameter)
        for name, parameter in parameters.items()
        for key in ENTRIES
    }
    for path in sorted(wanted.keys() | entries.keys()):
        _check(path, entries.get(path), wanted.get(path))
    for name, parameter in parameters.items():
        optimizer.state[parameter] = {
            key: _placed(key, entries[f"{name}/{key}"], parameter) for key in ENTRIES
        }


def _shape_and_dtype(key: str, parameter: Tensor) -> tuple[torch.Size, torch.dtype]:
    """What an entry must be: a number for the step, for moments what the parameter is."""
    return (torch.Size(), torch.float32) if key == STEP else (parameter.shape, parameter.dtype)


def _check(path: str, value: Tensor | None, wanted: tuple[torch.Size, torch.dtype] | None) -> None:
    if value is None:
        raise _refused(path, "lacks it")
    if wanted is None:
        raise _refused(path, "has it, but this model's AdamW does not")
    shape, dtype = wanted
    if (value.shape, value.dtype) != wanted:
        raise _refused(
            path,
            f"has it as {list(value.shape)} of {value.dtype}, and it must be {list(shape)} of "
            f"{dtype}",
        )


def _refused(path: str, difference: str) -> ConfigError:
    return ConfigError(
        "checkpoint",
        path,
        f"must be in {OPTIMIZER} as the model needs it: the file {difference}",
        "Remove this checkpoint folder and resume from the one before.",
    )


def _placed(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    if key == STEP:  # fused AdamW keeps it on the device
        return value.to(parameter.device) if parameter.is_cuda else value.clone()
    if isinstance(parameter, DTensor):
        value = value.to(parameter.device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value.to(device=parameter.device).clone()


def random_state() -> dict[str, Tensor]:
    """Every generator of this process from which a training step may draw."""
    version, words, gauss = random.getstate()
    assert version == 3
    kind, keys, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Go on from where `random_state` was taken."""
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy_gauss"])))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
