"""Buffers that stay float32 when a model is cast to bfloat16 or half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Float32State(nn.Module):
    """A module whose floating-point buffers move between devices but never lose precision.

    An average over thousands of tokens does not fit bfloat16, and a count above 256 not even as
    a whole number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_widen)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = {
            name: buffer
            for name, buffer in self._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        }
        result = super()._apply(fn, recurse)
        for name, before in exact.items():
            after = self._buffers[name]
            if after is not None and after.dtype != torch.float32:
                self._buffers[name] = before.to(device=after.device, dtype=torch.float32)
        return result


def _widen(module: nn.Module, _incompatible: object) -> None:
    """`load_state_dict(assign=True)` takes any dtype."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.float())
