"""Operations that keep the precision of their arguments under autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def own_precision(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Switch autocast off inside `operation`, on the device of its first tensor argument."""

    @wraps(operation)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        with torch.autocast(device, enabled=False):
            return operation(*args, **kwargs)

    return call
