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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import torch

from airmoe.experiments.bench.inputs import Shape
from airmoe.experiments.bench.timing import Limits, Step
from airmoe.flops import Column, Cost, Workload, count_layer
from airmoe.routers import AirRouter, RouterConfig


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


def count_work(
    shape: Shape, config: RouterConfig, parameter_bytes: int, *, plain: bool = False
) -> Work:
    """Of a layer with such a router; `plain` is one in PyTorch, without our kernels."""
    algorithmic = _flops(shape, config, "algorithmic")
    executed = algorithmic if plain else _flops(shape, config, "executed")
    return Work(algorithmic, executed, _moved(shape, config, parameter_bytes))


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


def _moved(shape: Shape, config: RouterConfig, parameter_bytes: int) -> Cost:
    tokens, row = shape.num_tokens, shape.dim * shape.torch_dtype.itemsize
    matrices = 3 if shape.activation == "swiglu" else 2
    rows = parameter_bytes // row - matrices * shape.num_experts  # of the router: it reads all
    if isinstance(config, AirRouter.Config):  # but codewords, and the lists of those in use
        listed = min(tokens, config.num_codewords) * config.shortlist_size
        rows = config.num_codewords + min(rows, listed)
    rows += matrices * min(shape.num_experts, tokens * shape.top_k)
    read = row * (tokens + rows)
    return Cost(read + row * tokens, read + row * 2 * tokens + parameter_bytes)


@cache
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """8192 x 8192 x 8192 and a copy of 2 GiB; toy sizes on a CPU."""
    size, length = (8192, 2**31) if device.type == "cuda" else (256, 2**24)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, device=device, dtype=dtype)
    source = torch.zeros(length, device=device, dtype=torch.int8)
    target = torch.empty_like(source)

    def seconds(action: Callable[[], Any]) -> float:
        return median(Step(device, [action]).totals(Limits(seconds=0.5))) / 1e3

    return Ceilings(
        dtype=str(dtype).removeprefix("torch."),
        flops=2 * size**3 / seconds(lambda: torch.mm(left, right, out=product)),
        bytes=2 * length / seconds(lambda: target.copy_(source)),
    )
