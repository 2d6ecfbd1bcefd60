"""Loss over whole held-out splits, exact to the token, and what the routers do there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.config import check_count
from airmoe.distributed import all_reduce_sum, is_distributed, rank, world_size
from airmoe.metrics import RoutingMeter, shortlist_staleness, unlisted_experts
from airmoe.metrics.quality import ALL
from airmoe.moe.recomputation import inside_backward
from airmoe.routers import AirRouter, PeerRouter, Router, Routing
from airmoe.training.capture import uncompiled


@dataclass(frozen=True)
class Evaluation:
    """The result of one pass over held-out blocks."""

    loss: float  # nats per token
    tokens: int  # predicted ones: a block's first token has no prediction
    routing: dict[str, float]
    usage: dict[str, Tensor] = field(default_factory=dict)  # see RoutingWatch.usage

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond that a float overflows

    def numbers(self) -> dict[str, float]:
        return {"loss": self.loss, "perplexity": self.perplexity, **self.routing}


@torch.no_grad()
def evaluate(
    model: nn.Module,
    blocks: Any,
    *,
    batch_size: int,
    quality_tokens: int,
    autocast: AbstractContextManager[Any] | None = None,
    on_batch: Callable[[], object] | None = None,
) -> Evaluation:
    """Every block once, split over the ranks; usage over all tokens, quality on a sample."""
    check_count("evaluate.quality_tokens", quality_tokens)
    device = next(model.parameters()).device
    watch, training = RoutingWatch(model, quality_tokens), model.training
    model.eval()
    watch.start()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # summed loss, predicted tokens
    try:
        with uncompiled(), autocast or nullcontext():
            for batch, counts in _batches(blocks, batch_size):
                if not counts:
                    watch.stop()  # for good, because such batches come last
                found = _summed_loss(model, batch.to(device))
                if counts:
                    total += found
                if on_batch is not None:
                    on_batch()
            routing = watch.numbers()
    finally:
        watch.stop()
        model.train(training)
    loss_sum, tokens_everywhere = all_reduce_sum(total).tolist()
    return Evaluation(loss_sum / tokens_everywhere, int(tokens_everywhere), routing, watch.usage())


def num_batches(blocks: Any, batch_size: int) -> int:
    """Forwards per rank: all ranks run equally many, because sharded parameters are gathered."""
    return math.ceil(math.ceil(len(blocks) / batch_size) / world_size())


def _batches(blocks: Any, batch_size: int) -> Iterator[tuple[Tensor, bool]]:
    """This rank's batches, and whether each counts or only keeps step with the other ranks."""
    starts = [*range(rank() * batch_size, len(blocks), world_size() * batch_size)]
    missing = num_batches(blocks, batch_size) - len(starts)
    for place, start in enumerate(starts + missing * [0]):
        chosen = range(start, min(start + batch_size, len(blocks)))
        batch = torch.stack([blocks[index]["input_ids"] for index in chosen])  # [batch, block]
        yield batch, place < len(starts)


def _summed_loss(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Sum of the token losses of a batch, and how many there are: [2] float64."""
    predicted = input_ids.shape[0] * (input_ids.shape[1] - 1)
    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    summed = (loss.float() * predicted).double()
    return torch.stack([summed, torch.full_like(summed, predicted)])


# -- what routers do ------------------------------------------------------------------------------


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

    def start(self) -> None:
        """Watch the forwards from now on, counting from zero."""
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
        names = found[0] if found else {}
        known = {name: [one for row in found if (one := row[name]) is not None] for name in names}
        return {name: fmean(values) for name, values in known.items() if values}

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
