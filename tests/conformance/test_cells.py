"""Cells, one per token (AIR) or several (hierarchical), against per-token definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from airmoe import CellRouting
from tests import oracles
from tests.conformance.common import (
    Case,
    Mode,
    dense_weights,
    leaves,
    route,
    row_cells,
    selected_ids,
    set_codebook,
    tokens,
)
from tests.tolerance import assert_close

TOKENS, DIM, EXPERTS = 43, 8, 48
SIZES = {"dim": DIM, "num_experts": EXPERTS, "top_k": 7}
CASES = [
    Case("hierarchical", {**SIZES, "num_clusters": 12, "num_selected_clusters": 2}),
    Case("hierarchical", {**SIZES, "num_clusters": 12, "num_selected_clusters": 9}),
    Case("hierarchical", {**SIZES, "num_clusters": 12, "num_selected_clusters": 12}),
    Case("hierarchical", {**SIZES, "num_clusters": 48, "num_selected_clusters": 7}),
    Case(
        "hierarchical",
        {**SIZES, "num_clusters": 8, "num_selected_clusters": 5, "normalize_centroids": False},
    ),
    Case("air", {**SIZES, "num_codewords": 6, "shortlist_size": 7}),
    Case("air", {**SIZES, "num_codewords": 6, "shortlist_size": 30}),
    Case("air", {**SIZES, "num_codewords": 1, "shortlist_size": 20}),
    Case("air", {**SIZES, "num_codewords": 7, "shortlist_size": 13, "normalize_centroids": False}),
    Case("air", {**SIZES, "num_codewords": 7, "shortlist_size": 13, "codebook": "euclidean"}),
]


def build(case: Case):
    router = case.build()
    with torch.no_grad():  # spread the norms: the projection must not be forgotten at either level
        for parameter in router.parameters():
            parameter.mul_(torch.linspace(0.5, 1.5, len(parameter))[:, None])
    if case.name == "air":
        codewords = oracles.project(tokens(case.config["num_codewords"], DIM, 1))
        if case.config.get("codebook") == "euclidean":  # its nearest is not that by cosine
            codewords = codewords * torch.linspace(0.2, 4.0, len(codewords))[:, None]
        set_codebook(router, codewords)
        router.freeze_codebook()
    return router


def own_lists(case: Case, router, dtype: torch.dtype) -> list[list[int]]:
    """AIR's shortlists from centroids and codewords alone."""
    codewords, centroids = router.codebook.codewords.to(dtype), router.centroids.to(dtype)
    size, normalize = case.config["shortlist_size"], case.config.get("normalize_centroids", True)
    return oracles.build_shortlists(codewords, centroids, size, normalize=normalize)


def own_choices(case: Case, router, hidden: Tensor, dtype: torch.dtype):
    """The per-token definition, with the shortlists of the router."""
    return case.choices(router, hidden.to(dtype), leaves(router, dtype))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cells_equal_the_per_token_definition(case: Case, mode: Mode):
    router, hidden = build(case), 2 * tokens(TOKENS, DIM, 2)
    routing = route(router, hidden, mode)
    assert isinstance(routing, CellRouting)
    per_token = case.config.get("num_selected_clusters", 1)
    assert routing.cells.rows_per_token == per_token
    assert len(routing.token_ids) == TOKENS * per_token
    assert (routing.pools.diff(dim=1) > 0).all()
    exact, plain = (own_choices(case, router, hidden, t) for t in (torch.float64, torch.float32))
    if case.name == "air":
        assert router.shortlists().tolist() == own_lists(case, router, torch.float64)
    assert selected_ids(routing) == [sorted(heads[0].expert_ids) for heads in exact]
    listed = routing.to_token_routing()
    assert listed.expert_ids.tolist() == [heads[0].expert_ids for heads in exact]
    h = hidden.double()
    for what, mine, read in (
        ("weights", dense_weights(routing), lambda c, h: oracles.dense_weights(c, EXPERTS, h)),
        ("probs", routing.expert_probs, lambda c, h: oracles.expert_probs(c, EXPERTS, h)),
        ("log_z", routing.log_z, oracles.log_z),
    ):
        assert_close(mine, read(exact, h), read(plain, hidden), what)
    assert routing.expert_counts.tolist() == oracles.expert_counts(exact, EXPERTS)


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=str)
def test_cell_probs_are_the_softmax_over_cells(case: Case):
    """Over clusters, or over the cosines to codewords: what the shortlist balance loss reads."""
    router, hidden = build(case), tokens(TOKENS, DIM, 3)
    routing = route(router, hidden, "eval")

    def plain(dtype: torch.dtype) -> Tensor:
        h = hidden.to(dtype)
        if case.name == "air":
            scores = oracles.project(h) @ oracles.project(router.codebook.codewords.to(dtype)).T
        else:
            scores = h @ oracles.project(router.cluster_centroids.detach().to(dtype)).T
        return torch.softmax(scores, dim=1).mean(dim=0)

    assert_close(routing.cell_probs, plain(torch.float64), plain(torch.float32), "cell_probs")
    counts = torch.bincount(row_cells(routing), minlength=len(routing.pools))
    assert torch.equal(routing.cell_counts, counts)


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
