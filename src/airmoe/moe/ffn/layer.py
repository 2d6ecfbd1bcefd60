"""Swapped layers, and what those of one model share: what it is reading, and one notice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from airmoe.moe.ffn.routing import UNCALIBRATED, PatientAirRouter
from airmoe.moe.layer import MoELayer
from airmoe.moe.notice import Notice
from airmoe.routers.planning import draw_ticket, traced_plan
from airmoe.routers.routing import Routing


class Reading:
    """What a decoder knows of the batch that it is reading, and does not hand to its layers."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None  # [B, positions], those in the cache come first
        self.goes_on = False  # it was given a cache, as whoever writes token by token does

    def __getstate__(self) -> dict[str, object]:
        return vars(Reading())  # a copy of the model reads batches of its own

    def watch(self, decoder: nn.Module) -> None:
        decoder.register_forward_pre_hook(self._note, with_kwargs=True)
        decoder.register_forward_hook(self._forget, always_call=True)

    def real_tokens(self, hidden: Tensor) -> Tensor | None:
        """hidden [T, D] -> [T] bool, None where there is no mask that fits."""
        mask = self._mask
        if mask is None:
            return None
        batch, positions = mask.shape
        length = hidden.shape[0] // max(1, batch)
        if length * batch != hidden.shape[0] or not 0 < length <= positions:
            return None
        return mask[:, positions - length :].reshape(-1).to(hidden.device) != 0

    def _note(self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        # Masks of other shapes say who sees whom.
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.goes_on = kwargs.get("past_key_values", args[3] if len(args) > 3 else None) is not None

    def _forget(self, _decoder: nn.Module, _args: Any, _output: Any) -> None:
        self._mask, self.goes_on = None, False


class SwappedFfn(MoELayer):
    """A MoELayer in the place of a dense network: its router learns neither from padding nor from
    what the model is writing.

    Padding is routed all the same, so that with K = E its outputs too are those of the dense model.
    """

    reading: Reading | None = None

    def _route(self, hidden: Tensor, mask: Tensor | None, learn: bool) -> Routing:
        reading = self.reading or Reading()
        learn = learn and not reading.goes_on
        real = reading.real_tokens(hidden) if learn and self.in_training else None
        if real is None or mask is not None:
            return super()._route(hidden, mask, learn)
        if torch.compiler.is_compiling():
            valid, plan = traced_plan(self, self._handle, hidden, real, training=True)
            return self.router(hidden, None if valid is None else valid | ~real, plan)
        return self.router(hidden, None, self.make_plan(hidden, real, draw_ticket(), learn))


def connect(decoder: nn.Module) -> None:
    """Let all swapped layers of a decoder, also those of earlier calls, know of each other."""
    layers = [module for module in decoder.modules() if isinstance(module, SwappedFfn)]
    known = [layer.reading for layer in layers if layer.reading is not None]
    if not known:
        known = [Reading()]
        known[0].watch(decoder)
    for layer in layers:
        layer.reading = known[0]
    routers = [layer.router for layer in layers if isinstance(layer.router, PatientAirRouter)]
    given = (router.notice for router in routers if router.notice.given)
    notice = next(given, Notice(UNCALIBRATED))
    for router in routers:
        router.notice = notice
