"""Which implementation computes: plain PyTorch everywhere, Triton on CUDA devices.

`AIRMOE_BACKEND` (auto, reference, triton) or the context manager `use_backend` overrides the
choice. Where Triton cannot be used the reference runs, and one logged line says why.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from airmoe.errors import ConfigError

Backend = Literal["reference", "triton"]
Choice = Literal["auto", "reference", "triton"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Of the whole process and not of a thread: autograd runs the backward of CUDA tensors in threads of
# its own, and a layer that is recomputed there must find what its forward found.
_chosen: list[Choice] = []
_log = logging.getLogger("airmoe")


@contextmanager
def use_backend(name: Choice) -> Iterator[None]:
    """Compute with this backend inside the block, in all threads, whatever the environment says."""
    _chosen.append(_checked("use_backend", name))
    try:
        yield
    finally:
        _chosen.pop()


def backend_for(device: torch.device, *dtypes: torch.dtype) -> Backend:
    """The implementation for operands of these dtypes on this device."""
    choice = chosen_backend()
    if choice == "reference":
        return "reference"
    reason = _why_not_triton(device.type, dtypes)
    if reason is None and (choice == "triton" or device.type == "cuda"):
        return "triton"
    if choice == "triton" and device.type != "cuda":
        raise ConfigError(
            "backend", "triton", f"cannot run here: {reason}", "Use backend auto or reference."
        )
    if device.type == "cuda" and reason is not None:
        _say_once(reason)
    return "reference"


def assume_constant(function: Callable[..., Any]) -> None:
    """Compilers call it while they trace and keep what it says.

    What torch.compiler.assume_constant_result does, which would load the compiler here and now.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# A compiler cannot find the backend by tracing (it is in the environment), and
# therefore it stays what it was when the graph was made.
assume_constant(backend_for)


def chosen_backend() -> Choice:
    """What the user asked for: the innermost `use_backend`, then `AIRMOE_BACKEND`, then auto."""
    if _chosen:
        return _chosen[-1]
    return _checked("AIRMOE_BACKEND", os.environ.get("AIRMOE_BACKEND") or "auto")


def interpreted() -> bool:
    """True where Triton's interpreter runs the kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def use_triton(*operands: Tensor | None) -> bool:
    """True when Triton computes on these operands, which must be on one device."""
    tensors = [operand for operand in operands if operand is not None]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ConfigError(
            "device",
            sorted(str(device) for device in devices),
            "must be one device for all operands",
            "Move the layer and its input to the same device.",
        )
    dtypes = (tensor.dtype for tensor in tensors if tensor.is_floating_point())
    return backend_for(tensors[0].device, *dtypes) == "triton"


def _why_not_triton(device_type: str, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'airmoe[kernels]')"
    if device_type != "cuda" and not interpreted():
        return f"Triton has no {device_type} device; TRITON_INTERPRET=1 interprets it, slowly"
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"Triton kernels take float32, float16 and bfloat16, not {dtype}"
    return None


def _checked(field: str, name: str) -> Choice:
    if name not in get_args(Choice):
        choices = ", ".join(get_args(Choice))
        raise ConfigError(field, name, f"must be one of {choices}", "Use auto for the default.")
    return name  # type: ignore[return-value]


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("The plain PyTorch kernels are used, slower: %s.", reason)
