"""Which implementation computes: plain PyTorch everywhere, Triton on CUDA devices.

`AIRMOE_BACKEND` (auto, reference, triton) or the context manager `use_backend` overrides the
choice. Where Triton cannot be used, plain PyTorch runs, and one logged line says why.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from airmoe.errors import ConfigError

Backend = Literal["reference", "triton"]
Choice = Literal["auto", "reference", "triton"]
CHOICES = get_args(Choice)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Set for the whole process, not per thread: autograd runs the backward of CUDA tensors in its own
# threads, and a layer that is recomputed there must use what its forward used.
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
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return backend_for(tensors[0].device, *dtypes) == "triton"


def backend_for(device: torch.device, *dtypes: torch.dtype) -> Backend:
    """The implementation for operands of these dtypes on this device."""
    return _decide(chosen_backend(), interpreted(), device.type, dtypes)


def assume_constant(function: Callable[..., Any]) -> None:
    """Compilers call it while they trace and keep what it says.

    What torch.compiler.assume_constant_result does, which would load the compiler here and now.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# A compiler cannot find the backend by tracing (it is in the environment), so a compiled graph
# keeps the one that was chosen when it was made.
assume_constant(backend_for)


def chosen_backend() -> Choice:
    """What the user asked for: the innermost `use_backend`, then `AIRMOE_BACKEND`, then auto."""
    if _chosen:
        return _chosen[-1]
    return _checked("AIRMOE_BACKEND", os.environ.get("AIRMOE_BACKEND") or "auto")


def interpreted() -> bool:
    """True where Triton's interpreter runs the kernels on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache  # asked some thirty times in a forward
def _decide(
    choice: Choice, interpreter: bool, device_type: str, dtypes: tuple[torch.dtype, ...]
) -> Backend:
    if choice == "reference":
        return "reference"
    reason = _why_not_triton(interpreter, device_type, dtypes)
    if reason is None and (choice == "triton" or device_type == "cuda"):
        return "triton"
    if choice == "triton" and device_type != "cuda":
        raise ConfigError(
            "backend", "triton", f"cannot run here: {reason}", "Use backend auto or reference."
        )
    if device_type == "cuda" and reason is not None:
        _say_once(reason)
    return "reference"


def _why_not_triton(
    interpreter: bool, device_type: str, dtypes: tuple[torch.dtype, ...]
) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'airmoe[kernels]')"
    if device_type != "cuda" and not interpreter:
        return f"Triton has no {device_type} device; TRITON_INTERPRET=1 interprets it, slowly"
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"Triton kernels take float32, float16 and bfloat16, not {dtype}"
    return None


def _checked(field: str, name: str) -> Choice:
    if name not in CHOICES:
        choices = ", ".join(CHOICES)
        raise ConfigError(field, name, f"must be one of {choices}", "Use auto for the default.")
    return name  # type: ignore[return-value]


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("The plain PyTorch kernels are used, slower: %s.", reason)


def own_precision(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Switch autocast off inside `operation`, on the device of its first tensor argument."""

    @functools.wraps(operation)
    def without_autocast(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        with torch.autocast(device, enabled=False):
            return operation(*args, **kwargs)

    return without_autocast


def operator(
    name: str, *, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """`torch.library.custom_op` for a function that launches kernels.

    Triton launches on the current device, so that is set to the one of the first tensor.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        @functools.wraps(function)
        def on_its_device(*args: Any) -> Any:
            first = next(arg for arg in args if isinstance(arg, Tensor))
            with torch.cuda.device_of(first):
                return function(*args)

        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        return torch.library.custom_op(
            name, on_its_device, mutates_args=mutates_args, schema=schema
        )

    return register
