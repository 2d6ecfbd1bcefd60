"""The oracles against each other and against numbers computed by hand."""

from __future__ import annotations

import math

import torch

from tests import oracles
from tests.conformance import training_oracles as training


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_alg1_with_the_full_shortlist_is_exact_routing():
    hidden, codewords, centroids = normal(9, 6), normal(4, 6, seed=1), normal(11, 6, seed=2)
    noise = 0.3 * normal(9, 11, seed=3)
    air = oracles.alg1_forward(hidden, codewords, centroids, 11, 3, noise2=noise)
    exact = oracles.exact_topk(hidden, centroids, 3, noise=noise)
    for mine, theirs in zip(air.choices, exact, strict=True):
        assert mine[0].expert_ids == theirs[0].expert_ids
        assert torch.equal(mine[0].weights, theirs[0].weights)


def test_alg1_by_hand():
    # Two codewords on the axes; experts 0-1 lean to x, 2-3 to y; lists of two.
    codewords = torch.eye(2).double()
    centroids = torch.tensor([[2.0, 0.0], [3.0, 3.0], [0.0, 5.0], [-1.0, 1.0]]).double()
    hidden = torch.tensor([[4.0, 1.0], [1.0, 3.0]]).double()
    result = oracles.alg1_forward(hidden, codewords, centroids, 2, 1)
    assert result.codeword_ids == [0, 1]
    assert result.shortlists == [[0, 1], [1, 2]]  # experts 1 and 3 tie for y: the lower id
    first, second = result.choices[0][0], result.choices[1][0]
    assert first.expert_ids == [0]  # 4 against 5 / sqrt(2)
    assert second.expert_ids == [2]  # 3 against 4 / sqrt(2)
    expected = 1 / (1 + math.exp(5 / math.sqrt(2) - 4))
    assert abs(first.weights.item() - expected) < 1e-12  # K = 1: the softmax over the list


def test_hierarchical_with_every_cluster_is_the_sum_of_scores():
    hidden, clusters, centroids = normal(5, 6), normal(3, 6, seed=1), normal(12, 6, seed=2)
    chosen = oracles.hierarchical_route(hidden, clusters, centroids, 4, 3, normalize=False)
    combined = centroids + clusters.repeat_interleave(4, dim=0)
    exact = oracles.exact_topk(hidden, combined, 4, normalize=False)
    for mine, theirs in zip(chosen, exact, strict=True):
        assert mine[0].expert_ids == theirs[0].expert_ids
        assert torch.allclose(mine[0].weights, theirs[0].weights, atol=1e-12)


def test_expert_choice_with_capacity_for_all_is_the_full_softmax():
    hidden, centroids = normal(5, 6), normal(7, 6, seed=1)
    choices = oracles.expert_choice(oracles.exact_topk(hidden, centroids, 2), 7, 5)
    dense = oracles.dense_weights(choices, 7, hidden)
    assert torch.allclose(
        dense, torch.softmax(hidden @ oracles.project(centroids).T, 1), atol=1e-12
    )
    assert oracles.capacity(7, 3, 2) == 5 and oracles.capacity(6, 3, 2, 0.5) == 2


def test_alg2_by_hand():
    state = training.Codebook(
        torch.eye(3).double(), torch.tensor([4.0, 4.0, 1.0]).double(), 4 * torch.eye(3).double()
    )
    hidden = torch.tensor([[3.0, 4.0, 0.0], [5.0, 0.0, 0.0]]).double()
    new = training.alg2_update(hidden, state, 0.5, 1.0, pick=lambda g: 1)
    assert new.counts.tolist() == [2.5, 2.5, 1.0]  # 0.5 x 1 < 1: the third code died
    assert torch.allclose(new.sums[0], torch.tensor([2.5, 0.0, 0.0]).double())
    assert torch.allclose(new.sums[1], torch.tensor([0.3, 2.4, 0.0]).double())
    assert new.codewords[2].tolist() == [1.0, 0.0, 0.0]
    assert torch.allclose(new.codewords.norm(dim=1), torch.ones(3).double())
    flat = training.alg2_update(hidden, state, 0.5, 0.0, kind="euclidean")
    assert torch.allclose(flat.codewords[0], torch.tensor([4.5, 0.0, 0.0]).double() / 2.5)


def test_the_bound_of_proposition_1_holds():
    hidden, codewords = 0.3 * normal(20, 6), oracles.project(normal(4, 6, seed=1))
    for normalize in (True, False):
        centroids = 0.5 * normal(15, 6, seed=2)
        result = oracles.alg1_forward(hidden, codewords, centroids, 5, 3, normalize=normalize)
        logits = hidden @ oracles.project(centroids, normalize).T
        recall = oracles.mass_recall(result.choices, logits)
        lists = result.shortlists
        bound = oracles.mass_recall_bound(hidden, codewords, lists, centroids, normalize)
        assert (recall >= bound).all() and (bound > 0).all() and (recall < 1).all()


def test_balance_loss_is_k_when_all_are_equal():
    hidden = torch.zeros(6, 4).double()
    for top_k in (1, 3, 4):
        choices = oracles.exact_topk(hidden, torch.eye(4).double(), top_k)
        assert abs(oracles.balance_loss(choices, 4, hidden).item() - top_k) < 1e-12
