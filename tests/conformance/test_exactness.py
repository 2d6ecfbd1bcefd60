"""AIR with M = E is exact routing: ids, weights, statistics, gradients; jitter included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracles
from tests.conformance.common import Case, Mode, dense_weights, leaves, probe, route, tokens
from tests.tolerance import assert_close

TOKENS, SIZES = 31, {"dim": 12, "num_experts": 25, "top_k": 6}


def air_and_exact(jitter_std: float, normalize: bool, top_k: int = 6) -> tuple[Any, Any]:
    """AIR with lists of all experts, and the exact router, with equal centroids and seed."""
    shared = {**SIZES, "top_k": top_k, "jitter_std": jitter_std, "normalize_centroids": normalize}
    air = Case("air", {**shared, "num_codewords": 4, "shortlist_size": 25}).build(1)
    exact = Case("topk", shared).build(2)
    with torch.no_grad():
        air.centroids.mul_(torch.linspace(0.5, 2.0, 25)[:, None])
        exact.centroids.copy_(air.centroids)
    exact.noise_seed.copy_(air.noise_seed)
    return air, exact


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 6, 25])
@pytest.mark.parametrize("jitter_std", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_full_shortlists_are_exact_routing(
    mode: Mode, jitter_std: float, top_k: int, normalize: bool
):
    air, exact = air_and_exact(jitter_std, normalize, top_k)
    results = []
    for router in (air, exact):
        hidden = tokens(TOKENS, 12, 3).requires_grad_()
        routing = route(router, hidden, mode)
        loss = probe(dense_weights(routing), routing.expert_probs, routing.log_z)
        grads = torch.autograd.grad(loss, [hidden, router.centroids])
        results.append((routing, routing.to_token_routing(), *grads))
    assert torch.equal(air.micro_batches, exact.micro_batches)
    mine, theirs = results
    assert torch.equal(mine[1].expert_ids, theirs[1].expert_ids)
    assert torch.equal(mine[0].expert_counts, theirs[0].expert_counts)

    truth, plain = (jitter_free(exact, top_k, normalize, t) for t in (torch.float64, torch.float32))
    for i, what in enumerate(("weights", "expert_probs", "log_z", "hidden.grad", "centroids.grad")):
        values = [(dense_weights(r[0]), r[0].expert_probs, r[0].log_z, *r[2:])[i] for r in results]
        assert_agree(values[0], values[1], truth[i], plain[i], what)
        if mode == "eval" or jitter_std == 0:
            assert_close(values[0], truth[i], plain[i], what)


def jitter_free(router: Any, top_k: int, normalize: bool, dtype: torch.dtype) -> list[Tensor]:
    """What the loop above reads, by Eq. 1-2 without jitter."""
    h, weights = (
        tokens(TOKENS, 12, 3).to(dtype).requires_grad_(),
        leaves(router, dtype)["centroids"],
    )
    choices = oracles.exact_topk(h, weights, top_k, normalize)
    dense = oracles.dense_weights(choices, 25, h)
    probs, log_z = oracles.expert_probs(choices, 25, h), oracles.log_z(choices, h)
    grads = torch.autograd.grad(probe(dense, probs, log_z), [h, weights])
    return [dense, probs, log_z, *grads]


def assert_agree(mine: Tensor, theirs: Tensor, truth: Tensor, plain: Tensor, what: str) -> None:
    """Two float32 answers to one formula: each within the bound of float64, so two bounds apart.

    The noise is common to both; the formula without it sets the size of the bound.
    """
    half_the_gap = (mine.detach().double() - theirs.detach().double()) / 2
    assert_close(truth.detach() + half_the_gap, truth, plain, what)
