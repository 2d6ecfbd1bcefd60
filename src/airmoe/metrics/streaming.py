"""Routing statistics over many batches and ranks; keeps counts and sums, no tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.distributed import all_gather_rows, all_reduce_sum
from airmoe.metrics.quality import ALL, mass_recall_bound, routing_quality
from airmoe.metrics.usage import CodewordUsage, codeword_usage, dead_experts, usage_entropy
from airmoe.routers.air import AirRouter
from airmoe.routers.base import Router
from airmoe.routers.routing import CellRouting, Routing


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """What a meter saw on all ranks. None: never measured, or not defined for the router."""

    tokens: int  # valid tokens given to `update`
    entropy: float | None  # of expert usage, nats
    dead_experts: float | None  # fraction in [0, 1] that got no token
    load_imbalance: float | None  # tokens of the busiest expert / mean: 1 is perfect
    codewords: CodewordUsage | None  # of codewords (AIR) or clusters (hierarchical)
    quality_tokens: int  # valid tokens given to `update_quality`
    overlap: float | None  # means over those tokens
    mass_recall: float | None
    mass_recall_bound: float | None


class RoutingMeter:
    """Accumulates routings batch by batch; `compute` sums over ranks and reports.

    Every rank must call `compute` equally often, even if it saw no batch: give such a rank its
    `device` here if the process group needs GPU tensors.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device("cpu" if device is None else device)
        self.reset()

    def reset(self) -> None:
        """Forget everything seen so far."""
        self._counts: dict[str, Tensor] = {}  # int64: of experts [E] and cells [G]
        self._tokens: Tensor | int = 0
        self._quality_tokens: Tensor | int = 0
        self._bound_tokens: Tensor | int = 0
        # Sums over tokens of overlap, mass recall and its bound: [3] float64.
        self._quality_sums: Tensor | None = None
        # Counts of `experts` [E] and `cells` [G] on all ranks at the last `compute`: int64 on the
        # CPU, empty if nothing was counted.
        self.totals: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, routing: Routing) -> None:
        """Count the choices of one routing, without waiting for the device."""
        self._device = routing.valid.device
        self._tokens = self._tokens + routing.valid.sum()
        self._add("experts", routing.expert_counts)
        if isinstance(routing, CellRouting):
            self._add("cells", routing.cell_counts)

    @torch.no_grad()
    def update_quality(
        self, router: Router, hidden: Tensor, mask: Tensor | None = None, *, rows: slice = ALL
    ) -> None:
        """Compare a batch, or some `rows` of it, with exact routing, which scores all experts."""
        self._device = hidden.device
        quality = routing_quality(router, hidden, mask, rows=rows)
        measured = [quality.overlap, quality.mass_recall]  # each [T]
        num_valid = quality.valid.sum()
        self._quality_tokens = self._quality_tokens + num_valid
        if isinstance(router, AirRouter):
            compared = None if mask is None else mask[rows]
            measured.append(mass_recall_bound(router, hidden[rows], compared))
            self._bound_tokens = self._bound_tokens + num_valid
        sums = hidden.new_zeros(3, dtype=torch.float64)
        for place, values in enumerate(measured):
            sums[place] = torch.where(quality.valid, values, 0).sum(dtype=torch.float64)
        self._quality_sums = sums if self._quality_sums is None else self._quality_sums + sums

    def compute(self) -> RoutingReport:
        """Report over everything seen on all ranks; the meter can go on counting."""
        sizes = self._sizes_everywhere()
        nothing = {
            name: torch.zeros(size, dtype=torch.int64, device=self._device)
            for name, size in sizes.items()
        }
        tokens = [
            torch.as_tensor(number, dtype=torch.int64, device=self._device)
            for number in (self._tokens, self._quality_tokens, self._bound_tokens)
        ]
        counts = {**nothing, **self._counts}
        integers = all_reduce_sum(torch.cat([*counts.values(), torch.stack(tokens)])).cpu()
        expert_counts, cell_counts, tokens = integers.split([*sizes.values(), 3])
        self.totals = {"experts": expert_counts, "cells": cell_counts}
        sums = self._quality_sums
        if sums is None:
            sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        means = all_reduce_sum(sums).cpu() / tokens[[1, 1, 2]]  # NaN where nothing was measured
        counted, compared, bounded = (int(n) for n in tokens)
        return RoutingReport(
            tokens=counted,
            entropy=float(usage_entropy(expert_counts)) if counted else None,
            dead_experts=float(dead_experts(expert_counts)) if counted else None,
            load_imbalance=_imbalance(expert_counts) if counted else None,
            codewords=codeword_usage(cell_counts) if counted and sizes["cells"] else None,
            quality_tokens=compared,
            overlap=float(means[0]) if compared else None,
            mass_recall=float(means[1]) if compared else None,
            mass_recall_bound=float(means[2]) if bounded else None,
        )

    def _sizes_everywhere(self) -> dict[str, int]:
        """Number of experts and cells, on which all ranks that know them agree; 0 if none does."""
        names = ("experts", "cells")
        known = [self._counts[name].numel() if name in self._counts else 0 for name in names]
        row = torch.tensor(known, dtype=torch.int64, device=self._device)
        rows = all_gather_rows(row).tolist()  # [ranks][2]
        sizes = {}
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            if len(found := sorted(set(column) - {0})) > 1:
                raise ValueError(
                    f"RoutingMeter: ranks counted {found} {name}, must agree, because their counts "
                    "are summed. Use one meter per router, the same on every rank."
                )
            sizes[name] = found[0] if found else 0
        return sizes

    def _add(self, name: str, counts: Tensor) -> None:
        total = self._counts.get(name)
        if total is not None and total.shape != counts.shape:
            raise ValueError(
                f"RoutingMeter.update: got a routing over {counts.numel()} {name}, must be "
                f"{total.numel()} as before. Use one meter per router."
            )
        # Out of place, because the first total is the routing's own tensor.
        self._counts[name] = counts.detach() if total is None else total + counts.detach()


def _imbalance(counts: Tensor) -> float:
    return float(counts.max() / counts.to(torch.float64).mean())
