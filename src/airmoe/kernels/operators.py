"""Registering kernels as operators of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


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
