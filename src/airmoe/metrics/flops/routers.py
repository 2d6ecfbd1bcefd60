"""What routing costs, per token and mixture-of-experts layer: one function per router.

A router of your own is counted once its settings are registered:

    @count_router.register
    def _(config: MyRouter.Config, workload: Workload, losses: RouterLosses) -> RouterCount: ...
"""

from __future__ import annotations

import math
from functools import singledispatch

from airmoe.errors import ConfigError
from airmoe.metrics.flops.air import count_air
from airmoe.metrics.flops.convention import add, log_sum_exp, product, softmax, top_k
from airmoe.metrics.flops.ledger import Part, Term, both
from airmoe.metrics.flops.router_parts import (
    BALANCE,
    COARSE,
    FINE,
    RouterCount,
    balance_of_cells,
    balance_of_means,
    candidate_scores,
    jitter,
    load_balance,
    no_gradient,
    router_z,
    slots_of,
    summary,
    unit_centroids,
)
from airmoe.metrics.flops.workload import RouterLosses, Workload
from airmoe.routers import (
    ExpertChoiceRouter,
    HierarchicalRouter,
    PeerRouter,
    RouterConfig,
    TopKRouter,
)


@singledispatch
def count_router(config: RouterConfig, workload: Workload, losses: RouterLosses) -> RouterCount:
    """Terms of one layer."""
    raise ConfigError(
        "flops.router",
        type(config).__qualname__,
        "must be a router the ledger can count",
        "Register a count for it: @count_router.register (airmoe.metrics.flops).",
    )


@count_router.register
def _(config: TopKRouter.Config, workload: Workload, losses: RouterLosses) -> RouterCount:
    experts, active, dim = config.num_experts, config.top_k, config.dim
    switch = active == 1  # its weight is the probability among all experts
    terms = [
        *unit_centroids(config, workload),
        # The gradient reaches the scores of all experts in a dense [T, E], in ours those chosen.
        Term(FINE, "scores", product(experts, dim), None),
        Term(FINE, "best experts", None, no_gradient(experts, dim, "airmoe::best_experts")),
        Term(FINE, "their logits", None, product(active, dim, operator="airmoe::chosen_logits")),
        *jitter(config, FINE, experts),
        both(FINE, "selection", top_k(experts, active, gradient=True)),
        both(FINE, "weights", softmax(experts if switch else active)),
    ]
    summarized = switch or losses.load_balance or losses.router_z
    if summarized:
        part: Part = FINE if switch else BALANCE
        terms.append(Term(part, "softmax over all experts", None, summary(experts, dim)))
    terms += load_balance(losses, experts, config, workload, counted=switch)
    terms += router_z(losses, log_sum_exp(experts))
    return RouterCount(tuple(terms), active, active, "airmoe::token_experts")


@count_router.register
def _(config: ExpertChoiceRouter.Config, workload: Workload, losses: RouterLosses) -> RouterCount:
    experts, dim = config.num_experts, config.dim
    slots = slots_of(config, workload, config.capacity_factor)
    active = experts * slots / workload.tokens_per_micro_batch
    terms = [
        *unit_centroids(config, workload),
        Term(FINE, "scores", product(experts, dim), None),
        Term(FINE, "softmax over all experts", None, summary(experts, dim)),
        Term(FINE, "best tokens", None, no_gradient(experts, dim, "aten.mm")),
        Term(FINE, "their logits", None, product(active, dim, operator="airmoe::gather_dot")),
        *jitter(config, FINE, experts),
        both(FINE, "probabilities", softmax(experts)),
        both(FINE, "selection", top_k(experts, slots)),
        *load_balance(losses, experts, config, workload, counted=True),
        *router_z(losses, log_sum_exp(experts)),
    ]
    return RouterCount(tuple(terms), active, active, "airmoe::gather_dot, airmoe::scatter_total")


@count_router.register
def _(config: PeerRouter.Config, workload: Workload, losses: RouterLosses) -> RouterCount:
    heads, dim, side = config.num_heads, config.dim, math.isqrt(config.num_experts)
    per_head = config.top_k // heads
    per_side = min(per_head, side)  # sub-keys of each half that a head's best pairs can have
    sub_keys = 2 * heads * side
    full = per_head == 1  # then the weight is the probability among all pairs
    terms = [
        both(COARSE, "queries", product(heads * dim, dim)),
        both(COARSE, "scores of sub-keys", product(sub_keys, dim // 2, operator="aten.bmm")),
        *jitter(config, COARSE, sub_keys),
        both(COARSE, "best sub-keys", top_k(side, per_side, lists=2 * heads, gradient=True)),
        both(FINE, "sums of pairs", add(heads * per_side**2)),
        both(FINE, "selection", top_k(per_side**2, per_head, lists=heads, gradient=True)),
        both(FINE, "weights", softmax(side, 2 * heads) if full else softmax(per_head, heads)),
    ]
    if losses.load_balance:
        pairs = product(config.num_experts, heads, operator="aten.bmm")
        terms += [
            both(BALANCE, "softmax over sub-keys", softmax(side, 2 * heads)),
            both(BALANCE, "probabilities of pairs", pairs),
            *balance_of_means(config, workload),
        ]
    terms += router_z(losses, log_sum_exp(side, 2 * heads))
    return RouterCount(tuple(terms), config.top_k, config.top_k, "airmoe::token_experts")


@count_router.register
def _(config: HierarchicalRouter.Config, workload: Workload, losses: RouterLosses) -> RouterCount:
    clusters, selected, dim = config.num_clusters, config.num_selected_clusters, config.dim
    candidates = selected * config.num_experts // clusters
    terms = [
        *unit_centroids(config, workload, config.num_experts + clusters),
        both(COARSE, "scores of clusters", product(clusters, dim)),
        *jitter(config, COARSE, clusters),
        both(COARSE, "best clusters", top_k(clusters, selected, gradient=True)),
        *candidate_scores(config, candidates, "airmoe::cell_scores"),
        both(FINE, "cluster scores added", add(candidates)),
        both(FINE, "selection", top_k(candidates, config.top_k, gradient=True)),
        both(FINE, "weights", softmax(candidates if config.top_k == 1 else config.top_k)),
        *load_balance(losses, candidates, config, workload, counted=config.top_k == 1),
        *router_z(losses, log_sum_exp(candidates)),
    ]
    if losses.shortlist_balance:
        terms += balance_of_cells("clusters", clusters)
    return RouterCount(tuple(terms), config.top_k, candidates, "airmoe::cell_experts")


count_router.register(count_air)
