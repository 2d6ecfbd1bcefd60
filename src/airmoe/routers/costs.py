"""FLOPs of routers: the terms that several share, then those of AIR (Alg. 1 to 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from airmoe import flops
from airmoe.flops import BALANCE, COARSE, FINE, REFRESH, RouterCount, RouterLosses, Term, Workload
from airmoe.routers.settings import CentroidConfig, RouterConfig


def candidate_scores(config: RouterConfig, candidates: int) -> Iterator[Term]:
    """M candidates, with gradients for all of them."""
    yield flops.both(FINE, "scores", flops.product(candidates, config.dim))
    yield from jitter(config, FINE, candidates)


def jitter(config: RouterConfig, part: flops.Part, scores: int) -> Iterator[Term]:
    if config.jitter_std > 0:
        yield flops.both(part, "jitter", flops.elementwise("add", scores))


def unit_centroids(
    config: CentroidConfig, workload: Workload, rows: int | None = None
) -> Iterator[Term]:
    """Projected anew in every micro-batch."""
    if config.normalize_centroids:
        unit = flops.normalize(config.dim, config.num_experts if rows is None else rows)
        yield flops.both(FINE, "unit centroids", unit, workload.micro_batches_per_token)


def summary(part: flops.Part, config: RouterConfig) -> Term:
    """`kernels.softmax_summary`: its backward scores all experts once more."""
    operation = flops.product(config.num_experts, config.dim, gradients=3)
    return Term(part, "softmax over all experts", None, operation)


def slots_of(config: Any, tokens: int) -> int:
    """The slots of an expert for this many tokens: ceil(T K / E * factor), at most all of them.

    `ExpertChoiceRouter` has as many; `capacity_of` says how many of them it fills.
    """
    share = tokens * config.top_k / config.num_experts * config.capacity_factor
    return min(tokens, math.ceil(share))


def choice_by_tokens(
    config: RouterConfig, workload: Workload, losses: RouterLosses, candidates: int
) -> Iterator[Term]:
    """Every token takes the K best of its candidates; and the losses over these."""
    active = config.top_k
    switch = active == 1  # its weight is the probability among all of them
    yield flops.both(FINE, "selection", flops.top_k(candidates, active, gradient=True))
    yield flops.both(FINE, "weights", flops.softmax(candidates if switch else active))
    yield from count_router_losses(config, workload, losses, candidates, counted=switch)


def choice_by_experts(
    config: RouterConfig, workload: Workload, losses: RouterLosses, candidates: int
) -> Iterator[Term]:
    """Every expert takes its most probable tokens; and the losses."""
    slots = slots_of(config, workload.tokens_per_micro_batch)
    yield flops.both(FINE, "probabilities", flops.softmax(candidates))
    yield flops.both(FINE, "selection", flops.top_k(candidates, slots))
    yield from count_router_losses(config, workload, losses, candidates, counted=True)


def active_by_experts(config: Any, workload: Workload) -> float:
    """The mean number of experts of a token where experts choose."""
    tokens = workload.tokens_per_micro_batch
    return config.num_experts * slots_of(config, tokens) / tokens


def count_router_losses(
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
            yield flops.both(BALANCE, "softmax over candidates", flops.softmax(candidates))
        mean = flops.elementwise("mean over tokens", candidates)
        yield flops.both(BALANCE, "mean over tokens", mean)
        yield from balance_of_means(config, workload)
    yield from router_z(losses, candidates)


def balance_of_means(config: RouterConfig, workload: Workload) -> Iterator[Term]:
    yield flops.both(BALANCE, "counts", flops.scatter(config.top_k))
    together = flops.multiply(config.num_experts)
    yield flops.both(BALANCE, "counts * means", together, workload.micro_batches_per_token)


def router_z(losses: RouterLosses, size: int, rows: int = 1) -> Iterator[Term]:
    if losses.router_z:
        yield flops.both(BALANCE, "log Z", flops.log_sum_exp(size, rows))


def balance_of_cells(losses: RouterLosses, name: str, size: int) -> Iterator[Term]:
    """The balance loss one level up, over clusters or codewords."""
    if losses.shortlist_balance:
        yield flops.both(BALANCE, f"softmax over {name}", flops.softmax(size))
        # A weighted mean, as a product with the tokens' weights, which need no gradient.
        yield flops.both(BALANCE, f"mean of {name}", flops.product(size, 1, gradients=1))


def count_air(config: Any, workload: Workload, losses: RouterLosses) -> RouterCount:
    """Coarse stage, refresh and fine stage of one layer, from an `AirRouter.Config`."""
    codewords, dim, candidates = config.num_codewords, config.dim, config.shortlist_size
    by_expert = config.gate == "expert_choice"
    assignment = flops.product(codewords, dim, gradients=0)
    terms = [
        *_codebook(config, workload),
        flops.both(COARSE, "assignment for routing", assignment),
        flops.both(COARSE, "nearest codeword for routing", flops.top_k(codewords, 1)),
        *_refresh(config, workload),
        *candidate_scores(config, candidates),
        *(choice_by_experts if by_expert else choice_by_tokens)(
            config, workload, losses, candidates
        ),
    ]
    if losses.shortlist_balance:  # the gradient reaches tokens only
        terms.append(
            flops.both(BALANCE, "cosines to codewords", flops.product(codewords, dim, gradients=1))
        )
    terms += balance_of_cells(losses, "codewords", codewords)
    active = active_by_experts(config, workload) if by_expert else config.top_k
    return RouterCount(tuple(terms), active, candidates)


def _codebook(config: Any, workload: Workload) -> Iterator[Term]:
    """Alg. 2, without gradients; a static codebook stays as its first batch made it."""
    codewords, dim = config.num_codewords, config.dim
    if config.codebook == "static":
        return
    assignment = flops.product(codewords, dim, gradients=0)
    yield flops.both(COARSE, "assignment for the update", assignment)
    yield flops.both(COARSE, "nearest codeword", flops.top_k(codewords, 1))
    each = workload.micro_batches_per_token
    if config.codebook == "spherical":
        yield flops.both(COARSE, "directions of tokens", flops.normalize(dim, 1, backward=False))
        projected = flops.normalize(dim, codewords, backward=False)
        yield flops.both(COARSE, "directions of codewords", projected, each)
    yield flops.both(COARSE, "sums and counts", flops.scatter(dim + 1))
    moved = codewords * (dim + 1)
    yield flops.both(COARSE, "old sums, decayed", flops.multiply(moved, gradient=False), each)
    yield flops.both(COARSE, "new sums, weighed", flops.multiply(moved, gradient=False), each)
    yield flops.both(COARSE, "their sum", flops.elementwise("add", moved), each)


def _refresh(config: Any, workload: Workload) -> Iterator[Term]:
    """Alg. 1, lines 1 and 4-7: on each device, once per step or every few steps."""
    codewords, experts, dim = config.num_codewords, config.num_experts, config.dim
    steps = workload.devices / workload.tokens_per_step  # per token, repeated on each device
    times = steps / config.refresh_every
    pairs = codewords * experts
    yield flops.both(
        REFRESH, "codewords times experts", flops.product(pairs, dim, gradients=0), times
    )
    if config.jitter_std > 0:
        yield flops.both(REFRESH, "jitter", flops.elementwise("add", pairs), times)
    best = flops.top_k(experts, config.shortlist_size, lists=codewords)
    yield flops.both(REFRESH, "shortlists", best, times)
    if config.normalize_centroids:
        # Alg. 3 projects in every micro-batch; ours keeps the norms until the next step.
        unit = flops.normalize(dim, experts)
        yield Term(REFRESH, "unit centroids", unit, None, workload.micro_batches_per_token)
        yield Term(REFRESH, "unit centroids, kept", None, unit, steps)
