"""Measures a model's routers through forward hooks: usage, and a sample against exact routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.distributed import is_distributed
from airmoe.metrics import RoutingMeter, shortlist_staleness, unlisted_experts
from airmoe.metrics.quality import ALL
from airmoe.moe.replay import inside_backward
from airmoe.routers import AirRouter, PeerRouter, Router, Routing


def uncompiled() -> Any:
    """A block in which compiled layers run as plain Python, or every new hook would recompile."""
    return torch.compiler.set_stance("force_eager")


@dataclass(frozen=True)
class _Sample:
    """Some tokens of a batch; where experts choose tokens, all, because tokens compete."""

    hidden: Tensor  # [n, D]
    valid: Tensor  # [n]
    compared: slice  # of these, with exact routing


class RoutingWatch:
    """Counts what the routers of a model do while it is on.

    Costs a count per forward, and one exact routing of the sampled tokens per call of `numbers`.
    """

    def __init__(self, model: nn.Module, sample_tokens: int) -> None:
        self._sample_tokens = sample_tokens
        found = [(name, one) for name, one in model.named_modules() if isinstance(one, Router)]
        self._layers = [layer_of(name) for name, _ in found]
        self._routers = [router for _, router in found]
        self._samples: dict[int, _Sample] = {}  # by router
        self._meters: list[RoutingMeter] = []
        self._hooks: list[Any] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the forwards of a block, counting from zero."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        self.stop()
        device = next((router.micro_batches.device for router in self._routers), None)
        self._meters = [RoutingMeter(device) for _ in self._routers]
        self._samples = {}
        self._hooks = [
            router.register_forward_hook(self._hook(place))
            for place, router in enumerate(self._routers)
        ]

    @property
    def is_on(self) -> bool:
        return bool(self._hooks)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, place: int) -> Any:
        def after_forward(router: nn.Module, inputs: tuple[Any, ...], routing: Routing) -> None:
            if inside_backward():
                return  # activation checkpointing runs the forward again
            self._meters[place].update(routing)
            if place not in self._samples:
                stride = max(1, routing.num_tokens // self._sample_tokens)
                rows = slice(None, stride * self._sample_tokens, stride)  # of all sequences
                kept, compared = (ALL, rows) if routing.experts_choose else (rows, ALL)
                hidden = inputs[0].detach()[kept].clone()
                self._samples[place] = _Sample(hidden, routing.valid[kept], compared)

        return after_forward

    def numbers(self) -> dict[str, float]:
        """Means over the MoE layers, without what a router lacks; every rank must call it.

        Stops the watch, because comparing the sample with exact routing routes it once more.
        """
        self.stop()
        found: list[dict[str, float | None]] = []
        for place, router in enumerate(self._routers):
            meter = self._meters[place]
            sample = self._samples.get(place, _no_tokens(router) if is_distributed() else None)
            if sample is not None and not isinstance(router, PeerRouter):
                meter.update_quality(router, sample.hidden, sample.valid, rows=sample.compared)
            lists = {"unlisted_experts": _unlisted(router), "staleness": _staleness(router)}
            found.append(vars(meter.compute()) | lists)
        return _means(found)

    def usage(self) -> dict[str, Tensor]:
        """Tokens of each expert and cell, as `numbers` last counted them: "experts.N" [E] and
        "cells.N" [G] int64 for the routers of decoder layer N."""
        return {
            f"{name}.{layer}": counts
            for layer, meter in zip(self._layers, self._meters, strict=True)
            for name, counts in meter.totals.items()
            if counts.numel()
        }


def layer_of(name: str) -> str:
    """`model.layers.3.mlp.router` -> 3; the whole name where it has no number."""
    return next((part for part in name.split(".") if part.isdigit()), name)


def _no_tokens(router: Router) -> _Sample:
    """For a rank that saw no batch: it must still take part in gathering sharded parameters."""
    device = router.micro_batches.device
    nothing = torch.zeros(1, router.config.dim, device=device)
    return _Sample(nothing, torch.zeros(1, device=device).bool(), ALL)


def _staleness(router: Router) -> float | None:
    if not (isinstance(router, AirRouter) and router.training) or router.built_at is None:
        return None
    return shortlist_staleness(router)


def _unlisted(router: Router) -> float | None:
    """Share of experts on no shortlist that the watched forwards used."""
    if not isinstance(router, AirRouter) or (router.training and router.built_at is None):
        return None
    lists = router.training_lists if router.training else router.evaluation_lists
    return unlisted_experts(lists.experts, router.config.num_experts)


def _means(found: list[dict[str, float | None]]) -> dict[str, float]:
    names = found[0] if found else {}
    known = {name: [one for row in found if (one := row[name]) is not None] for name in names}
    return {name: fmean(values) for name, values in known.items() if values}
