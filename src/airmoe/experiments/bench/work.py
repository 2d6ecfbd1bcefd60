"""The work of a contender, and the least time a device can need for it.

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
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch

from airmoe.experiments.bench.inputs import Shape
from airmoe.experiments.bench.timing import Limits, Timer, sample, step_of
from airmoe.flops import Column, Cost, Workload, count_layer
from airmoe.routers import AirRouter, HierarchicalRouter, PeerRouter, RouterConfig


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches on a matrix product and on a copy."""

    dtype: str
    flops: float  # per second, of one large square product
    bytes: float  # per second, read and written, of one large copy


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


def count_work(shape: Shape, config: RouterConfig, *, plain: bool = False) -> Work:
    """Of a layer with such a router; `plain` is one in PyTorch, without our kernels."""
    algorithmic = _flops(shape, config, "algorithmic")
    executed = algorithmic if plain else _flops(shape, config, "executed")
    return Work(algorithmic, executed, _moved(shape, config))


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


@cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """8192 x 8192 x 8192 and a copy of 2 GiB; toy sizes on a CPU."""
    timer = Timer(device)
    size, length = (8192, 2**31) if timer.on_gpu else (256, 2**24)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    source = torch.zeros(length, device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    limits = Limits(seconds=0.5)

    def seconds(action: Callable[[], Any]) -> float:
        return median(lap for (lap,) in sample(timer, step_of(timer, action), limits)) / 1e3

    return Ceilings(
        dtype=str(dtype).removeprefix("torch."),
        flops=2 * size**3 / seconds(lambda: torch.mm(left, right, out=product)),
        bytes=2 * length / seconds(lambda: target.copy_(source)),
    )
