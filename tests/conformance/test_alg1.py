"""AirRouter against the float64 loops of Alg. 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests import oracles
from tests.conformance.common import Case, dense_weights, route, row_cells, set_codebook, tokens
from tests.tolerance import assert_close

DIM, EXPERTS, CODEWORDS, SHORTLIST, TOP_K, TOKENS = 12, 40, 7, 13, 5, 53


def prepared(jitter_std: float = 0.0, seed: int = 0, **options):
    """A router whose codebook is given and frozen, so that only the forward pass is tested."""
    options = {
        "dim": DIM,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "num_codewords": CODEWORDS,
        "shortlist_size": SHORTLIST,
        "jitter_std": jitter_std,
        **options,
    }
    router = Case("air", options).build(seed)
    with torch.no_grad():  # norms from 0.3 to 3: without the projection another expert wins
        router.centroids.mul_(torch.linspace(0.3, 3.0, EXPERTS)[:, None])
    set_codebook(router, oracles.project(tokens(CODEWORDS, DIM, seed + 1)))
    router.freeze_codebook()
    return router


def test_cell_probs_are_the_mean_softmax_over_codeword_similarity():
    """The coarse stage's own distribution, for the shortlist balance loss."""
    router = prepared()
    hidden = tokens(TOKENS, DIM, 6)
    routing = route(router, hidden, "eval")

    def plain(dtype: torch.dtype) -> Tensor:
        h, c = hidden.to(dtype), router.codebook.codewords.to(dtype)
        cosine = torch.stack([torch.stack([x @ y / (x.norm() * y.norm()) for y in c]) for x in h])
        return torch.softmax(cosine, dim=1).mean(dim=0)

    assert_close(routing.cell_probs, plain(torch.float64), plain(torch.float32), "cell_probs")


def test_the_euclidean_router_assigns_by_distance():
    """Ablation: nearest by L2, lists by <c, w> with c as it is."""
    router = prepared(codebook="euclidean")
    lengths = torch.linspace(0.2, 4.0, CODEWORDS)[:, None]
    set_codebook(router, router.codebook.codewords * lengths)
    hidden = tokens(TOKENS, DIM, 7)
    routing = route(router, hidden, "eval")
    codewords = router.codebook.codewords.double()
    nearest = [oracles.nearest_codeword(h, codewords, "euclidean") for h in hidden.double()]
    by_cosine = [oracles.nearest_codeword(h, codewords) for h in hidden.double()]
    assert nearest != by_cosine  # or the test would prove nothing
    assert router.codebook.assign(hidden).tolist() == nearest
    assert [nearest[t] for t in routing.token_ids.tolist()] == row_cells(routing).tolist()
    lists = oracles.build_shortlists(codewords, router.centroids.double(), SHORTLIST)
    assert router.shortlists().tolist() == lists


def test_fine_scoring_adds_the_token_jitter_inside_the_list():
    """Alg. 1, line 10, with the noise read off a router that scores every expert (K = E)."""
    router = prepared(jitter_std=0.5)
    hidden = tokens(TOKENS, DIM, 9)
    routing = route(router, hidden, "train")
    everyone = Case(
        "topk", {"dim": DIM, "num_experts": EXPERTS, "top_k": EXPERTS, "jitter_std": 0.5}
    ).build()
    with torch.no_grad():
        everyone.centroids.copy_(router.centroids)
    everyone.noise_seed.copy_(router.noise_seed)
    everyone.micro_batches.copy_(router.micro_batches)
    everyone.train()
    noisy = dense_weights(everyone(hidden)).detach().double().log()  # up to a constant per token
    lists, cells = router.shortlists(), router.codebook.assign(hidden)
    dense = dense_weights(routing).detach()
    for token in range(TOKENS):
        pool = lists[cells[token]].tolist()
        choice = oracles.choose(pool, noisy[token, pool], TOP_K)
        assert dense[token].nonzero().flatten().tolist() == sorted(choice.expert_ids)
        # The logits were read from float32 weights: relative error of a few roundings.
        assert torch.allclose(dense[token, choice.expert_ids].double(), choice.weights, rtol=1e-5)


def test_alg1_by_hand():
    """The oracle itself, against numbers computed by hand."""
    # Two codewords on the axes; experts 0-1 lean to x, 2-3 to y; lists of two.
    codewords = torch.eye(2).double()
    centroids = torch.tensor([[2.0, 0.0], [3.0, 3.0], [0.0, 5.0], [-1.0, 1.0]]).double()
    hidden = torch.tensor([[4.0, 1.0], [1.0, 3.0]]).double()
    assert [oracles.nearest_codeword(h, codewords) for h in hidden] == [0, 1]
    lists = oracles.build_shortlists(codewords, centroids, 2)
    assert lists == [[0, 1], [1, 2]]  # experts 1 and 3 tie for y: the lower id
    (first,), (second,) = oracles.air_route(hidden, codewords, lists, centroids, 1)
    assert first.expert_ids == [0]  # 4 against 5 / sqrt(2)
    assert second.expert_ids == [2]  # 3 against 4 / sqrt(2)
    expected = 1 / (1 + math.exp(5 / math.sqrt(2) - 4))
    assert abs(first.weights.item() - expected) < 1e-12  # K = 1: the softmax over the list
