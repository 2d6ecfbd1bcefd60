"""What the FLOPs of routers have in common: candidates, jitter, unit centroids, losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from airmoe.flops import (
    BALANCE,
    FINE,
    Operation,
    Part,
    RouterLosses,
    Term,
    Workload,
    add,
    both,
    log_sum_exp,
    mean_over_tokens,
    multiply,
    normalize,
    product,
    scatter,
    softmax,
)
from airmoe.routers.settings import CentroidConfig, RouterConfig


def candidate_scores(config: RouterConfig, candidates: int, operator: str) -> Iterator[Term]:
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
    """`kernels.softmax_summary`: its backward scores all experts once more."""
    return product(experts, dim, operator="airmoe::softmax_summary", gradients=3)


def slots_of(config: Any, workload: Workload) -> int:
    """Tokens that an expert takes of a micro-batch."""
    tokens = workload.tokens_per_micro_batch
    share = tokens * config.top_k / config.num_experts * config.capacity_factor
    return min(tokens, math.ceil(share))


def router_losses(
    config: RouterConfig,
    workload: Workload,
    losses: RouterLosses,
    candidates: int,
    *,
    counted: bool,
) -> Iterator[Term]:
    """Load balancing E * sum_e f_e P_e, and the squared log Z, over a token's candidates.

    Their softmax may be counted already. f is counts per token (it sums to K): its scale is one
    factor of a micro-batch, not counted.
    """
    if losses.load_balance:
        if not counted:
            yield both(BALANCE, "softmax over candidates", softmax(candidates))
        yield both(BALANCE, "mean over tokens", mean_over_tokens(candidates))
        yield from balance_of_means(config, workload)
    yield from router_z(losses, candidates)


def balance_of_means(config: RouterConfig, workload: Workload) -> Iterator[Term]:
    yield both(BALANCE, "counts", scatter(config.top_k))
    together = multiply(config.num_experts)
    yield both(BALANCE, "counts * means", together, workload.micro_batches_per_token)


def router_z(losses: RouterLosses, size: int, rows: int = 1) -> Iterator[Term]:
    if losses.router_z:
        yield both(BALANCE, "log Z", log_sum_exp(size, rows))


def balance_of_cells(losses: RouterLosses, name: str, size: int) -> Iterator[Term]:
    """The balance loss one level up, over clusters or codewords."""
    if losses.shortlist_balance:
        yield both(BALANCE, f"softmax over {name}", softmax(size))
        # A weighted mean, as a product with the tokens' weights, which need no gradient.
        yield both(BALANCE, f"mean of {name}", product(size, 1, gradients=1))
