"""What AIR's routing costs: codebook, shortlists, candidates."""

from __future__ import annotations

from collections.abc import Iterator

from airmoe.metrics.flops.convention import (
    add,
    log_sum_exp,
    multiply,
    normalize,
    product,
    scatter,
    softmax,
    top_k,
)
from airmoe.metrics.flops.ledger import Part, Term, both
from airmoe.metrics.flops.router_parts import (
    BALANCE,
    COARSE,
    FINE,
    RouterCount,
    balance_of_cells,
    candidate_scores,
    load_balance,
    no_gradient,
    router_z,
    slots_of,
)
from airmoe.metrics.flops.workload import RouterLosses, Workload
from airmoe.routers import AirRouter

REFRESH: Part = "router refresh"


def count_air(config: AirRouter.Config, workload: Workload, losses: RouterLosses) -> RouterCount:
    """Coarse stage, refresh and fine stage of one layer (Alg. 1 to 3)."""
    codewords, dim = config.num_codewords, config.dim
    candidates = config.shortlist_size
    by_token = config.gate != "expert_choice"
    operator = "airmoe::cell_gates" if by_token else "airmoe::cell_scores"
    assignment = no_gradient(codewords, dim, "airmoe::nearest_codeword")
    active: float = config.top_k
    terms = [
        *_codebook(config, workload),
        both(COARSE, "assignment for routing", assignment),
        both(COARSE, "nearest codeword for routing", top_k(codewords, 1)),
        *_refresh(config, workload),
        *candidate_scores(config, candidates, operator),
    ]
    if by_token:
        full = config.top_k == 1
        terms += [
            both(FINE, "selection", top_k(candidates, config.top_k, gradient=True)),
            both(FINE, "weights", softmax(candidates if full else config.top_k)),
        ]
    else:
        full = True
        slots = slots_of(config, workload, config.capacity_factor)
        active = config.num_experts * slots / workload.tokens_per_micro_batch
        terms += [
            both(FINE, "probabilities", softmax(candidates)),
            both(FINE, "selection", top_k(candidates, slots)),
        ]
    terms += load_balance(losses, candidates, config, workload, counted=full)
    terms += router_z(losses, log_sum_exp(candidates))
    if losses.shortlist_balance:  # the gradient reaches tokens only
        terms.append(both(BALANCE, "cosines to codewords", product(codewords, dim, gradients=1)))
        terms += balance_of_cells("codewords", codewords)
    return RouterCount(tuple(terms), active, candidates, "airmoe::cell_experts")


def _codebook(config: AirRouter.Config, workload: Workload) -> Iterator[Term]:
    """Alg. 2, without gradients; a static codebook stays as its first batch made it."""
    codewords, dim = config.num_codewords, config.dim
    if config.codebook == "static":
        return
    assignment = no_gradient(codewords, dim, "airmoe::nearest_codeword")
    yield both(COARSE, "assignment for the update", assignment)
    yield both(COARSE, "nearest codeword", top_k(codewords, 1))
    if config.codebook == "spherical":
        yield both(COARSE, "directions of tokens", normalize(dim, 1, backward=False))
        projected = normalize(dim, codewords, backward=False)
        yield both(COARSE, "directions of codewords", projected, workload.micro_batches_per_token)
    yield both(COARSE, "sums and counts", scatter(dim + 1))
    moved = codewords * (dim + 1)
    each = workload.micro_batches_per_token
    yield both(COARSE, "old sums, decayed", multiply(moved, gradient=False), each)
    yield both(COARSE, "new sums, weighed", multiply(moved, gradient=False), each)
    yield both(COARSE, "their sum", add(moved), each)


def _refresh(config: AirRouter.Config, workload: Workload) -> Iterator[Term]:
    """Alg. 1, lines 1 and 4-7: on each device, once per step or every few steps."""
    codewords, experts, dim = config.num_codewords, config.num_experts, config.dim
    part, steps = REFRESH, workload.steps_per_token
    times = steps / config.refresh_every
    pairs = codewords * experts
    yield both(part, "codewords times experts", no_gradient(pairs, dim, "airmoe::top_m"), times)
    if config.jitter_std > 0:
        yield both(part, "jitter", add(pairs), times)
    best = top_k(experts, config.shortlist_size, lists=codewords)
    yield both(part, "shortlists", best, times)
    if config.normalize_centroids:
        # Alg. 3 projects in every micro-batch; ours keeps the norms until the next step.
        unit = normalize(dim, experts)
        yield Term(part, "unit centroids", unit, None, workload.micro_batches_per_token)
        yield Term(part, "unit centroids, kept", None, unit, steps)
