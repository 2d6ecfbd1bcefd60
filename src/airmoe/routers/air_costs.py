"""What AIR's routing costs in FLOPs: codebook, shortlists, candidates (Alg. 1 to 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from airmoe.flops import (
    BALANCE,
    COARSE,
    FINE,
    REFRESH,
    RouterCount,
    RouterLosses,
    Term,
    Workload,
    add,
    both,
    multiply,
    normalize,
    product,
    scatter,
    softmax,
    top_k,
)
from airmoe.routers.costs import (
    balance_of_cells,
    candidate_scores,
    no_gradient,
    router_losses,
    slots_of,
)


def count_air(config: Any, workload: Workload, losses: RouterLosses) -> RouterCount:
    """Coarse stage, refresh and fine stage of one layer, from an `AirRouter.Config`."""
    codewords, dim, candidates = config.num_codewords, config.dim, config.shortlist_size
    by_token = config.gate != "expert_choice"
    operator = "airmoe::cell_gates" if by_token else "airmoe::cell_scores"
    assignment = no_gradient(codewords, dim, "airmoe::nearest_codeword")
    terms = [
        *_codebook(config, workload),
        both(COARSE, "assignment for routing", assignment),
        both(COARSE, "nearest codeword for routing", top_k(codewords, 1)),
        *_refresh(config, workload),
        *candidate_scores(config, candidates, operator),
    ]
    active: float = config.top_k
    full = active == 1 or not by_token  # gates are probabilities among all candidates
    if by_token:
        terms += [
            both(FINE, "selection", top_k(candidates, config.top_k, gradient=True)),
            both(FINE, "weights", softmax(candidates if full else config.top_k)),
        ]
    else:
        slots = slots_of(config, workload)
        active = config.num_experts * slots / workload.tokens_per_micro_batch
        terms += [
            both(FINE, "probabilities", softmax(candidates)),
            both(FINE, "selection", top_k(candidates, slots)),
        ]
    terms += router_losses(config, workload, losses, candidates, counted=full)
    if losses.shortlist_balance:  # the gradient reaches tokens only
        terms.append(both(BALANCE, "cosines to codewords", product(codewords, dim, gradients=1)))
    terms += balance_of_cells(losses, "codewords", codewords)
    return RouterCount(tuple(terms), active, candidates, "airmoe::cell_experts")


def _codebook(config: Any, workload: Workload) -> Iterator[Term]:
    """Alg. 2, without gradients; a static codebook stays as its first batch made it."""
    codewords, dim = config.num_codewords, config.dim
    if config.codebook == "static":
        return
    assignment = no_gradient(codewords, dim, "airmoe::nearest_codeword")
    yield both(COARSE, "assignment for the update", assignment)
    yield both(COARSE, "nearest codeword", top_k(codewords, 1))
    each = workload.micro_batches_per_token
    if config.codebook == "spherical":
        yield both(COARSE, "directions of tokens", normalize(dim, 1, backward=False))
        projected = normalize(dim, codewords, backward=False)
        yield both(COARSE, "directions of codewords", projected, each)
    yield both(COARSE, "sums and counts", scatter(dim + 1))
    moved = codewords * (dim + 1)
    yield both(COARSE, "old sums, decayed", multiply(moved, gradient=False), each)
    yield both(COARSE, "new sums, weighed", multiply(moved, gradient=False), each)
    yield both(COARSE, "their sum", add(moved), each)


def _refresh(config: Any, workload: Workload) -> Iterator[Term]:
    """Alg. 1, lines 1 and 4-7: on each device, once per step or every few steps."""
    codewords, experts, dim = config.num_codewords, config.num_experts, config.dim
    steps = workload.steps_per_token
    times = steps / config.refresh_every
    pairs = codewords * experts
    yield both(REFRESH, "codewords times experts", no_gradient(pairs, dim, "airmoe::top_m"), times)
    if config.jitter_std > 0:
        yield both(REFRESH, "jitter", add(pairs), times)
    best = top_k(experts, config.shortlist_size, lists=codewords)
    yield both(REFRESH, "shortlists", best, times)
    if config.normalize_centroids:
        # Alg. 3 projects in every micro-batch; ours keeps the norms until the next step.
        unit = normalize(dim, experts)
        yield Term(REFRESH, "unit centroids", unit, None, workload.micro_batches_per_token)
        yield Term(REFRESH, "unit centroids, kept", None, unit, steps)
