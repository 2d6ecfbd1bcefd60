"""Weights, optimizer and random states: as plain tensors out of a run, and back into one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from airmoe.distributed import full_tensor
from airmoe.errors import ConfigError
from airmoe.training.checkpoints import OPTIMIZER, USE_THE_ONE_BEFORE, load_tensors, refused

STEP = "step"
ENTRIES = ("exp_avg", "exp_avg_sq", STEP)


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Weights and routing state of a checkpoint into a model of the same shape, sharded or not."""
    saved, own = load_tensors(checkpoint / "model.safetensors"), model.state_dict()
    for name, tensor in saved.items():
        if name in own and own[name].dtype != tensor.dtype:
            raise _other_model(checkpoint, f"{name} is of {tensor.dtype}, not {own[name].dtype}")
    try:
        placed = {name: _sharded_like(own.get(name), tensor) for name, tensor in saved.items()}
        result = model.load_state_dict(placed, strict=False)
    except RuntimeError as error:  # shapes differ
        raise _other_model(checkpoint, str(error).splitlines()[-1].strip()) from error
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if is_tied else set()
    if missing := sorted(set(result.missing_keys) - tied):
        raise _other_model(checkpoint, f"it lacks {missing[0]}")
    if result.unexpected_keys:
        raise _other_model(checkpoint, f"the model has no {result.unexpected_keys[0]}")


def _other_model(checkpoint: Path, difference: str) -> ConfigError:
    return refused(
        checkpoint,
        f"must be of the same model as the run's config ({difference})",
        "The folder was changed or mixed with another run: start a new one.",
    )


def _sharded_like(own: Tensor | None, tensor: Tensor) -> Tensor:
    """Cut into shards where the model's own is, because whole tensors cannot be copied there."""
    if not isinstance(own, DTensor) or own.shape != tensor.shape:
        return tensor
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements)


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
    named = model.named_parameters()
    parameters = {name: parameter for name, parameter in named if id(parameter) in optimized}
    wanted = {}  # name of an entry -> its shape and dtype
    for name, parameter in parameters.items():
        for key in ENTRIES:
            moment = parameter.shape, parameter.dtype
            wanted[f"{name}/{key}"] = (torch.Size(), torch.float32) if key == STEP else moment
    for name in sorted(wanted.keys() | entries.keys()):
        _check_entry(name, entries.get(name), wanted.get(name))
    for name, parameter in parameters.items():
        # Copies, because a loaded tensor shares its file's memory. Fused AdamW wants the step on
        # the device too.
        found = {key: entries[f"{name}/{key}"].to(parameter.device) for key in ENTRIES}
        optimizer.state[parameter] = {
            key: _sharded_like(parameter, value).clone() for key, value in found.items()
        }


def _check_entry(
    name: str, value: Tensor | None, wanted: tuple[torch.Size, torch.dtype] | None
) -> None:
    if value is None:
        difference = "lacks it"
    elif wanted is None:
        difference = "has it, but this model's AdamW does not"
    elif (value.shape, value.dtype) != wanted:
        shape, dtype = wanted
        has = f"{list(value.shape)} of {value.dtype}"
        difference = f"has it as {has}, and it must be {list(shape)} of {dtype}"
    else:
        return
    rule = f"must be in {OPTIMIZER} as the model needs it: the file {difference}"
    raise ConfigError("checkpoint", name, rule, USE_THE_ONE_BEFORE)


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
