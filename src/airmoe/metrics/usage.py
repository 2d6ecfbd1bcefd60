"""How evenly experts and codewords are used, over batches and ranks, and how stale lists are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.distributed import all_gather_rows, all_reduce_sum
from airmoe.errors import ConfigError
from airmoe.metrics.quality import ALL, mass_recall_bound, router_mode, routing_quality
from airmoe.routers.air import AirRouter
from airmoe.routers.base import Router
from airmoe.routers.routing import CellRouting, Routing

REMEDY = "Give routing.expert_counts or routing.cell_counts, summed over batches."
# What a meter sums over tokens, in this order.
TOKENS, COMPARED, BOUNDED, OVERLAP, RECALL, BOUND = range(6)


def usage_entropy(counts: Tensor) -> Tensor:
    """Entropy in nats of the usage distribution counts / sum(counts): ln E at perfect balance.

    counts [E] or [G] are summed over batches and ranks. The result is a 0-d float64 tensor on their
    device, so that a training loop need not synchronise; NaN if nothing was counted.
    Its exponential is the perplexity: that many equally used experts have this entropy.
    """
    _check_counts(counts)
    total = counts.sum(dtype=torch.float64)
    return torch.special.entr(counts.to(torch.float64) / total).sum()


def dead_experts(counts: Tensor) -> Tensor:
    """Fraction in [0, 1] of experts that got no token; a 0-d float64 tensor."""
    _check_counts(counts)
    return (counts == 0).to(torch.float64).mean()


@torch.no_grad()
def shortlist_staleness(router: AirRouter) -> float:
    """Fraction of the training shortlists' entries that a rebuild now would replace.

    The codebook moves with every micro-batch, the shortlists only after an optimizer step (Alg. 3).
    The comparison uses the jitter of the lists in use, so only real movement counts: 0 right after
    a rebuild, and without a tracked optimizer, when every forward rebuilds. NaN before the first.
    """
    if not router.tracked and int(router.micro_batches) > 0:
        return 0.0
    if router.built_at is None:
        return float("nan")
    # Not `router.shortlists()`, which rebuilds stale lists.
    used = router.training_lists.experts  # [G, M], ascending
    with router_mode(router, training=True):  # jitter as in training
        fresh = router.rebuild_shortlists()  # [G, M], ascending
    place = torch.searchsorted(fresh, used).clamp(max=fresh.shape[1] - 1)  # [G, M]
    replaced = fresh.gather(1, place) != used
    return float(replaced.to(torch.float64).mean())


def unlisted_experts(shortlists: Tensor, num_experts: int) -> float:
    """Fraction of experts in none of the shortlists [G, M], which no token can choose."""
    return 1 - shortlists.unique().numel() / num_experts


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """What a meter saw on all ranks; None if never measured or not defined for the router."""

    entropy: float | None  # of expert usage, nats
    dead_experts: float | None  # fraction in [0, 1] that got no token
    load_imbalance: float | None  # tokens of the busiest expert / mean: 1 is perfect
    overlap: float | None  # means over the tokens given to `update_quality`
    mass_recall: float | None
    mass_recall_bound: float | None
    codeword_perplexity: float | None  # of codewords (AIR) or clusters (hierarchical)


class RoutingMeter:
    """Accumulates the routings of one router batch by batch; `compute` sums over ranks.

    It keeps counts and sums, no tokens. Every rank must call `compute` equally often, even if it
    saw no batch: give such a rank its `device` here if the process group needs GPU tensors.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._counts: dict[str, Tensor] = {}  # int64: of experts [E] and cells [G]
        self._sums = torch.zeros(6, dtype=torch.float64, device=device or "cpu")
        # Counts of `experts` [E] and `cells` [G] on all ranks at the last `compute`: int64 on the
        # CPU, empty if nothing was counted.
        self.totals: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, routing: Routing) -> None:
        """Count the choices of one routing, without waiting for the device."""
        self._add({TOKENS: routing.valid})
        counts = {"experts": routing.expert_counts}
        if isinstance(routing, CellRouting):
            counts["cells"] = routing.cell_counts
        for name, of_routing in counts.items():
            self._counts[name] = of_routing.detach() + self._counts.get(name, 0)

    @torch.no_grad()
    def update_quality(
        self, router: Router, hidden: Tensor, mask: Tensor | None = None, *, rows: slice = ALL
    ) -> None:
        """Compare a batch, or some `rows` of it, with exact routing, which scores all experts."""
        quality = routing_quality(router, hidden, mask, rows=rows)
        valid = quality.valid  # [t]
        found = {COMPARED: valid, OVERLAP: quality.overlap, RECALL: quality.mass_recall}
        if isinstance(router, AirRouter):
            compared = None if mask is None else mask[rows]
            bound = mass_recall_bound(router, hidden[rows], compared)
            found |= {BOUNDED: valid, BOUND: bound}
        self._add({place: torch.where(valid, values, 0) for place, values in found.items()})

    def _add(self, values: dict[int, Tensor]) -> None:
        self._sums = self._sums.to(next(iter(values.values())).device)
        for place, of_tokens in values.items():
            self._sums[place] += of_tokens.sum(dtype=torch.float64)

    def compute(self) -> RoutingReport:
        """Report over everything seen on all ranks; the meter can go on counting."""
        names, device = ("experts", "cells"), self._sums.device
        known = [self._counts[name].numel() if name in self._counts else 0 for name in names]
        # A rank that saw no batch learns the sizes from the others.
        sizes = all_gather_rows(torch.tensor(known, device=device)).amax(0).tolist()
        counts = [
            self._counts.get(name, torch.zeros(size, dtype=torch.int64, device=device))
            for name, size in zip(names, sizes, strict=True)
        ]
        experts, cells = all_reduce_sum(torch.cat(counts)).cpu().split(sizes)
        self.totals = {"experts": experts, "cells": cells}
        sums = all_reduce_sum(self._sums).tolist()

        def mean(place: int, tokens: int) -> float | None:
            return sums[place] / sums[tokens] if sums[tokens] else None

        counted = sums[TOKENS] > 0
        return RoutingReport(
            entropy=usage_entropy(experts).item() if counted else None,
            dead_experts=dead_experts(experts).item() if counted else None,
            load_imbalance=(experts.max() / experts.double().mean()).item() if counted else None,
            overlap=mean(OVERLAP, COMPARED),
            mass_recall=mean(RECALL, COMPARED),
            mass_recall_bound=mean(BOUND, BOUNDED),
            codeword_perplexity=usage_entropy(cells).exp().item() if counted and sizes[1] else None,
        )


def _check_counts(counts: Tensor) -> None:
    is_tensor = isinstance(counts, Tensor)
    if not is_tensor or counts.dim() != 1 or counts.numel() == 0:
        given = f"shape {tuple(counts.shape)}" if is_tensor else type(counts).__qualname__
        rule = "must be a tensor of tokens per expert or codeword, [num_experts] or [num_codewords]"
        raise ConfigError("counts", given, rule, REMEDY)
