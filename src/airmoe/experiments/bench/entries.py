"""All contenders by their names on the command line, and what each computes and moves.

FLOPs are products of the ledger (`airmoe.flops`) for one micro-batch, in both columns. The refresh
of the shortlists, once per optimizer step, is not in them: it is timed apart. A layer in plain
PyTorch executes what the algorithmic column counts, gradients of all candidates included.

Bytes are those that no implementation can avoid:

    forward   tokens read, output written; every row of a table that is touched read once
    backward  tokens and gradient of the output read, gradient of the tokens written; the touched
              rows read once more, dense gradients of all parameters written

with 2 or 4 bytes for a number; intermediate results could stay on the chip and count nothing.

    floor = max(executed FLOPs / FLOP ceiling, bytes / byte ceiling)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from airmoe.experiments.bench.cases import Inputs, Shape
from airmoe.experiments.bench.contenders import (
    Air,
    BalancedAir,
    Coarse,
    Contender,
    Exact,
    Hierarchical,
    Peer,
)
from airmoe.experiments.bench.plain import Listing, PeerPackage
from airmoe.experiments.bench.timing import Ceilings
from airmoe.flops import Column, Cost, Workload, count_layer
from airmoe.routers import AirRouter, HierarchicalRouter, PeerRouter, RouterConfig

Role = Literal["air", "baseline", "coarse"]  # a coarse layer is no granular baseline


@dataclass(frozen=True)
class Work:
    """The work of one micro-batch."""

    algorithmic: Cost  # FLOPs
    executed: Cost  # FLOPs
    moved: Cost  # bytes

    def floor_ms(self, ceilings: Ceilings, *, backward: bool) -> float:
        flops, moved = (
            cost.total if backward else cost.forward for cost in (self.executed, self.moved)
        )
        return 1e3 * max(flops / ceilings.flops, moved / ceilings.bytes)


def _flops(shape: Shape, config: RouterConfig, column: Column) -> Cost:
    tokens = shape.num_tokens
    workload = Workload(
        sequence_length=tokens, tokens_per_step=tokens, tokens_per_micro_batch=tokens
    )
    neurons = shape.top_k // config.top_k  # of a coarse expert K
    ledger = count_layer(config, workload, shape.activation, expert_size=neurons)
    once = ledger.cost(column, "router refresh", kind="product")
    each = ledger.cost(column, kind="product")
    return Cost(tokens * (each.forward - once.forward), tokens * each.backward)


def _moved(shape: Shape, config: RouterConfig) -> Cost:
    tokens, width = shape.num_tokens, shape.dim * shape.torch_dtype.itemsize
    matrices = 3 if shape.activation == "swiglu" else 2
    router_rows, read = _router_rows(config, tokens)
    read += matrices * min(shape.num_experts, tokens * shape.top_k)
    written = router_rows + matrices * shape.num_experts
    return Cost(width * (2 * tokens + read), width * (3 * tokens + read + written))


def _router_rows(config: RouterConfig, num_tokens: int) -> tuple[int, int]:
    """Rows of D numbers of the router's parameters, and how many of its tables are read."""
    rows = config.num_experts
    if isinstance(config, AirRouter.Config):
        cells = min(num_tokens, config.num_codewords)
        return rows, min(rows, cells * config.shortlist_size) + config.num_codewords
    if isinstance(config, PeerRouter.Config):  # queries, and two halves of every key
        rows = config.num_heads * (config.dim + math.isqrt(config.num_experts))
    elif isinstance(config, HierarchicalRouter.Config):
        rows += config.num_clusters
    return rows, rows


@dataclass(frozen=True)
class Entry:
    """A contender: how to build it, and what it costs."""

    key: str
    name: str
    role: Role
    kind: Callable[[Inputs, RouterConfig], Contender]
    config: Callable[[Shape], RouterConfig]  # whose FLOPs are its own
    plain: bool = False  # PyTorch as other people write it, nothing of ours
    experts_times: int = 1  # as many experts as the case has, times so many

    def shape(self, given: Shape) -> Shape:
        return replace(given, num_experts=self.experts_times * given.num_experts)

    def build(self, given: Inputs) -> Contender:
        shape = self.shape(given.shape)
        return self.kind(replace(given, shape=shape), self.config(shape))

    def work(self, given: Shape) -> Work:
        shape = self.shape(given)
        config = self.config(shape)
        algorithmic = _flops(shape, config, "algorithmic")
        executed = algorithmic if self.plain else _flops(shape, config, "executed")
        return Work(algorithmic, executed, _moved(shape, config))


ENTRIES = {
    entry.key: entry
    for entry in (
        Entry("air", "AIR", "air", Air, Shape.air),
        Entry("air-balanced", "AIR + balance loss", "air", BalancedAir, Shape.air),
        Entry("air-16-times", "AIR, 16 E", "air", Air, Shape.air, experts_times=16),
        Entry("coarse", "coarse", "coarse", Coarse, Shape.coarse),
        Entry("hierarchical", "hierarchical", "baseline", Hierarchical, Shape.hierarchical),
        Entry("exact", "exact", "baseline", Exact, Shape.exact),
        Entry("peer", "PEER", "baseline", Peer, Shape.peer),
        Entry("listing", "paper's listing", "baseline", Listing, Shape.listing, plain=True),
        Entry("peer-pytorch", "PEER-pytorch", "baseline", PeerPackage, Shape.peer, plain=True),
    )
}
