"""What routers have in common: candidates, jitter, unit centroids, losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from airmoe.metrics.flops.convention import (
    Operation,
    add,
    mean_over_tokens,
    multiply,
    normalize,
    product,
    scatter,
    softmax,
)
from airmoe.metrics.flops.ledger import Part, Term, both
from airmoe.metrics.flops.workload import RouterLosses, Workload
from airmoe.routers import AirRouter, ExpertChoiceRouter, HierarchicalRouter, RouterConfig
from airmoe.routers.base import CentroidConfig

FINE: Part = "router fine"
COARSE: Part = "router coarse"
BALANCE: Part = "balance losses"


@dataclass(frozen=True)
class RouterCount:
    """The router's own terms, and how many experts a token then has."""

    terms: tuple[Term, ...]
    active: float  # K
    executed: float  # in cells: all of the pool
    experts_operator: str


def candidate_scores(
    config: AirRouter.Config | HierarchicalRouter.Config, candidates: int, operator: str
) -> Iterator[Term]:
    """M candidates in both columns, and with gradients for all of them."""
    paper, ours = (product(candidates, config.dim, operator=op) for op in ("aten.bmm", operator))
    yield Term(FINE, "scores", paper, ours)
    yield from jitter(config, FINE, candidates)


def jitter(config: RouterConfig, part: Part, scores: int) -> Iterator[Term]:
    if config.jitter_std > 0:
        yield both(part, "jitter", add(scores))


def unit_centroids(
    config: CentroidConfig, workload: Workload, rows: int | None = None
) -> Iterator[Term]:
    """Projected anew in every micro-batch."""
    if config.normalize_centroids:
        unit = normalize(config.dim, config.num_experts if rows is None else rows)
        yield both(FINE, "unit centroids", unit, workload.micro_batches_per_token)


def no_gradient(rows: int, width: int, operator: str) -> Operation:
    return product(rows, width, operator=operator, gradients=0)


def summary(experts: int, dim: int) -> Operation:
    """`kernels.dense.softmax_summary`: its backward scores all experts once more."""
    return product(experts, dim, operator="airmoe::softmax_summary", gradients=3)


def slots_of(
    config: AirRouter.Config | ExpertChoiceRouter.Config, workload: Workload, factor: float
) -> int:
    """Tokens that an expert takes of a micro-batch."""
    tokens = workload.tokens_per_micro_batch
    return min(tokens, math.ceil(tokens * config.top_k / config.num_experts * factor))


def load_balance(
    losses: RouterLosses,
    candidates: int,
    config: RouterConfig,
    workload: Workload,
    *,
    counted: bool,
) -> Iterator[Term]:
    """E * sum_e f_e P_e over a token's candidates; their softmax may be counted already.

    f is counts per token (it sums to K): its scale is one factor of a micro-batch, not counted.
    """
    if not losses.load_balance:
        return
    if not counted:
        yield both(BALANCE, "softmax over candidates", softmax(candidates))
    yield both(BALANCE, "mean over tokens", mean_over_tokens(candidates))
    yield from balance_of_means(config, workload)


def balance_of_means(config: RouterConfig, workload: Workload) -> Iterator[Term]:
    yield both(BALANCE, "counts", scatter(config.top_k))
    together = multiply(config.num_experts)
    yield both(BALANCE, "counts * means", together, workload.micro_batches_per_token)


def router_z(losses: RouterLosses, operation: Operation) -> Iterator[Term]:
    if losses.router_z:
        yield both(BALANCE, "log Z", operation)


def balance_of_cells(name: str, size: int) -> Iterator[Term]:
    """The same loss one level up, over clusters or codewords."""
    yield both(BALANCE, f"softmax over {name}", softmax(size))
    # A weighted mean, as a product with the tokens' weights, which need no gradient.
    yield both(BALANCE, f"mean of {name}", product(size, 1, gradients=1))
