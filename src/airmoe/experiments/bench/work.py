"""What a layer computes and must move, and how long that takes at the measured ceilings.

FLOPs are counted twice, products only. *Algorithmic*: M candidates scored and K experts run per
token; only the chosen K have a gradient (`metrics.flops`, which counts whole runs, gives one to all
candidates, as the paper does). *Executed*: dense cells run all M experts of a pool in both
directions. A backward is twice its forward; what is computed anew is not counted.

Bytes are those that no implementation avoids:

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

from airmoe.experiments.bench.cases import Shape
from airmoe.experiments.bench.timing import Ceilings


@dataclass(frozen=True)
class Amount:
    """Of one forward and its backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Work:
    """All that one micro-batch needs."""

    algorithmic: Amount  # FLOPs
    executed: Amount  # FLOPs
    moved: Amount  # bytes

    def floor_ms(self, ceilings: Ceilings, *, backward: bool) -> float:
        flops = self.executed.total if backward else self.executed.forward
        moved = self.moved.total if backward else self.moved.forward
        return 1e3 * max(flops / ceilings.flops, moved / ceilings.bytes)


@dataclass(frozen=True)
class Products:
    """Rows that each token is multiplied with: in the router's forward and backward, by experts."""

    scored: float
    learned: float  # of those scored, how many get a gradient
    active: float

    def flops(self, shape: Shape) -> Amount:
        each = 2 * shape.num_tokens * shape.dim
        experts = _matrices(shape) * self.active
        return Amount(each * (self.scored + experts), 2 * each * (self.learned + experts))


def _matrices(shape: Shape) -> int:
    return 3 if shape.activation == "swiglu" else 2


def _work(
    shape: Shape, algorithmic: Products, executed: Products, router_rows: int, touched: int
) -> Work:
    """`router_rows`: rows of the router's parameters; `touched`: how many of them are read."""
    width = shape.dim * shape.torch_dtype.itemsize
    experts = _matrices(shape) * shape.num_experts
    active = _matrices(shape) * min(shape.num_experts, shape.num_tokens * shape.top_k)
    read = touched + active
    return Work(
        algorithmic.flops(shape),
        executed.flops(shape),
        Amount(
            width * (2 * shape.num_tokens + read),
            width * (3 * shape.num_tokens + read + router_rows + experts),
        ),
    )


def _shortlisted(shape: Shape) -> int:
    """Centroids in the shortlists of the cells that have tokens, at most."""
    cells = min(shape.num_tokens, shape.num_codewords)
    return min(shape.num_experts, cells * shape.shortlist_size)


def air_work(shape: Shape) -> Work:
    groups, pool, active = shape.num_codewords, shape.shortlist_size, shape.top_k
    return _work(
        shape,
        Products(groups + pool, active, active),
        Products(groups + pool, pool, pool),
        shape.num_experts,
        _shortlisted(shape) + groups,
    )


def listing_work(shape: Shape) -> Work:
    groups, pool, active = shape.num_codewords, shape.shortlist_size, shape.top_k
    return _work(
        shape,
        Products(groups + pool, active, active),
        Products(groups + pool, pool, active),
        shape.num_experts,
        _shortlisted(shape) + groups,
    )


def hierarchical_work(shape: Shape) -> Work:
    groups, pool, active = shape.num_codewords, shape.shortlist_size, shape.top_k
    rows = shape.num_experts + groups
    return _work(
        shape,
        Products(groups + pool, groups + active, active),
        Products(groups + pool, groups + pool, pool),
        rows,
        rows,
    )


def exact_work(shape: Shape) -> Work:
    products = Products(shape.num_experts, shape.top_k, shape.top_k)
    return _work(shape, products, products, shape.num_experts, shape.num_experts)


def dense_exact_work(shape: Shape) -> Work:
    """As `exact_work`, but the gradient goes back through the whole [T, E] product."""
    algorithmic = Products(shape.num_experts, shape.top_k, shape.top_k)
    executed = Products(shape.num_experts, shape.num_experts, shape.top_k)
    return _work(shape, algorithmic, executed, shape.num_experts, shape.num_experts)


def peer_work(shape: Shape) -> Work:
    heads, side = shape.num_heads, math.isqrt(shape.num_experts)
    rows = heads * (shape.dim + side)  # queries, and two halves of every key
    products = Products(rows, rows, shape.top_k)
    return _work(shape, products, products, rows, rows)


def coarse_work(shape: Shape) -> Work:
    rows = shape.num_coarse_experts
    products = Products(rows, rows, shape.top_k)
    return _work(shape, products, products, rows, rows)


WorkOf = Callable[[Shape], Work]
