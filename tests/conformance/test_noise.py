"""Jitter: N(0, jitter_std^2), independent over tokens, experts and micro-batches, and pure.

The noise is read off routers that choose every expert: then log weight = logit + noise + constant.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracles
from tests.conformance.common import Case, dense_weights, route, set_codebook, tokens

TOKENS, EXPERTS, DIM, STD = 256, 64, 8, 0.5
EVERYONE = {"dim": DIM, "num_experts": EXPERTS, "top_k": EXPERTS, "jitter_std": STD}
PLAIN = [
    Case("topk", EVERYONE),
    Case("air", {**EVERYONE, "num_codewords": 4, "shortlist_size": EXPERTS}),
    Case("expert_choice", EVERYONE),
]
TWO_LEVELS = [
    Case("peer", {**EVERYONE, "num_heads": 1}),
    Case("hierarchical", {**EVERYONE, "num_clusters": 8, "num_selected_clusters": 8}),
]


def noise_of(router: Any, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """The noise of one forward, centred over experts. [T, E] float64"""
    with torch.no_grad():
        weights = dense_weights(router(hidden, mask)).double()
        logits = router.full_logits(hidden).double().reshape(len(hidden), EXPERTS)
    noise = weights.log() - logits
    return noise - noise.mean(dim=1, keepdim=True)


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return ((a * b).mean() / (a.std() * b.std())).item()


def assert_normal(sample: Tensor, std: float, what: str) -> None:
    """Mean, standard deviation and kurtosis within five standard errors."""
    n = sample.numel()
    assert abs(sample.mean().item()) < 5 * std / math.sqrt(n), what
    assert abs(sample.std().item() / std - 1) < 5 / math.sqrt(2 * n), what
    kurtosis = ((sample / sample.std()) ** 4).mean().item()
    assert abs(kurtosis - 3) < 5 * math.sqrt(24 / n), what


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_every_token_and_expert_has_its_own_normal_number(case: Case):
    router, hidden = case.build(), tokens(TOKENS, DIM, 1)
    route(router, hidden, "train")
    noise = noise_of(router, hidden)
    assert_normal(noise, STD * math.sqrt(1 - 1 / EXPERTS), str(case))
    per_expert, per_token = noise.mean(dim=0), noise.abs().mean(dim=1)
    assert per_expert.abs().max() < 5 * STD / math.sqrt(TOKENS)  # no expert is favoured
    expected = STD * math.sqrt(2 / math.pi * (1 - 1 / EXPERTS))
    assert (per_token / expected - 1).abs().max() < 5.5 * math.sqrt((math.pi / 2 - 1) / EXPERTS)
    over_tokens = torch.corrcoef(noise) - torch.eye(TOKENS)
    over_experts = torch.corrcoef(noise.T) - torch.eye(EXPERTS)
    assert over_tokens.abs().max() < 6 / math.sqrt(EXPERTS)
    assert over_experts.abs().max() < 6 / math.sqrt(TOKENS) + 1 / EXPERTS
    limit = 5 / math.sqrt(noise.numel()) + 1 / EXPERTS
    assert abs(correlation(noise[1:], noise[:-1])) < limit
    assert abs(correlation(noise[:, 1:], noise[:, :-1])) < limit
    assert abs(correlation(noise[1:] ** 2, noise[:-1] ** 2)) < limit
    assert abs(correlation(noise[1:, 1:], noise[:-1, :-1])) < limit


@pytest.mark.parametrize("case", PLAIN + TWO_LEVELS, ids=str)
def test_micro_batches_and_seeds_are_independent(case: Case):
    router, hidden = case.build(), tokens(TOKENS, DIM, 1)
    route(router, hidden, "train")
    first = noise_of(router, hidden)
    before = int(router.micro_batches)
    router.observe(hidden)
    assert int(router.micro_batches) == before + 1
    second = noise_of(router, hidden)
    router.micro_batches.fill_(before)
    router.noise_seed.add_(1)
    third = noise_of(router, hidden)
    # PEER has 2 x 8 numbers per token instead of 64: fewer independent pairs.
    independent = TOKENS * (14 if case.name == "peer" else EXPERTS)
    for a, b in ((first, second), (first, third), (second, third)):
        assert abs(correlation(a, b)) < 5 / math.sqrt(independent) * 1.5
        assert abs(correlation(a[1:], b[:-1])) < 5 / math.sqrt(independent) * 1.5
        assert abs((a - b).std().item() / (math.sqrt(2) * a.std().item()) - 1) < 0.05


def test_peer_jitters_the_sub_key_scores():
    """noise(i, j) = a_i + b_j, both N(0, std^2)."""
    router, hidden = TWO_LEVELS[0].build(), tokens(TOKENS, DIM, 1)
    route(router, hidden, "train")
    table = noise_of(router, hidden).view(TOKENS, 8, 8)
    first, second = table.mean(dim=2), table.mean(dim=1)
    residual = table - first[:, :, None] - second[:, None, :]
    assert residual.abs().max() < 1e-5  # float32 logs of weights
    for part in (first, second):
        assert_normal(part, STD * math.sqrt(1 - 1 / 8), "sub-keys")
    assert abs(correlation(first, second)) < 5 / math.sqrt(first.numel())


def test_hierarchical_jitters_both_levels():
    """noise(e) = cluster part + expert part, both N(0, std^2)."""
    router, hidden = TWO_LEVELS[1].build(), tokens(TOKENS, DIM, 1)
    route(router, hidden, "train")
    table = noise_of(router, hidden).view(TOKENS, 8, 8)  # [T, cluster, expert of it]
    clusters = table.mean(dim=2)
    within = table - clusters[:, :, None]
    assert_normal(within, STD * math.sqrt(1 - 1 / 8), "experts")
    assert_normal(clusters, STD * math.sqrt((1 + 1 / 8) * (1 - 1 / 8)), "clusters")


@pytest.mark.parametrize("case", PLAIN + TWO_LEVELS, ids=str)
def test_noise_belongs_to_the_counter_and_the_position(case: Case):
    """Whatever was observed before, and whichever other tokens there are."""
    router, hidden = case.build(), tokens(TOKENS, DIM, 1)
    route(router, hidden, "train")
    expected, counter = noise_of(router, hidden), router.micro_batches.clone()
    # float32 logs of weights as small as e^-10: 1e-5 is far below the noise of 0.5.
    if case.name != "expert_choice":  # there the others decide which experts a token has
        mask = torch.arange(TOKENS) % 3 > 0
        assert (noise_of(router, hidden, mask)[mask] - expected[mask]).abs().max() < 1e-5
        assert (noise_of(router, hidden[:50]) - expected[:50]).abs().max() < 1e-5
    for step in range(3):
        router.observe(tokens(17 + step, DIM, 50 + step))
    assert not torch.equal(router.micro_batches, counter)
    assert (noise_of(router, hidden) - expected).abs().max() > 0.1
    router.micro_batches.copy_(counter)
    assert (noise_of(router, hidden) - expected).abs().max() < 1e-5


def test_fine_scoring_adds_the_token_jitter_inside_the_list():
    """Alg. 1, line 10, with the noise read off a router that scores every expert (K = E)."""
    router = Case("air", {**EVERYONE, "top_k": 5, "num_codewords": 7, "shortlist_size": 13}).build()
    everyone, hidden = PLAIN[0].build(), tokens(53, DIM, 9)
    set_codebook(router, oracles.project(tokens(7, DIM, 1)))
    router.freeze_codebook()
    routing = route(router, hidden, "train")
    with torch.no_grad():
        everyone.centroids.copy_(router.centroids)
    everyone.noise_seed.copy_(router.noise_seed)
    everyone.micro_batches.copy_(router.micro_batches)
    noisy = dense_weights(everyone(hidden)).detach().double().log()  # up to a constant per token
    lists, cells = router.shortlists(), router.codebook.assign(hidden)
    for row, logits, cell in zip(dense_weights(routing).detach(), noisy, cells, strict=True):
        pool = lists[cell].tolist()
        choice = oracles.choose(pool, logits[pool], 5)
        assert row.nonzero().flatten().tolist() == sorted(choice.expert_ids)
        # The logits were read from float32 weights: relative error of a few roundings.
        assert torch.allclose(row[choice.expert_ids].double(), choice.weights, rtol=1e-5)


def test_shortlist_jitter_has_the_stated_size():
    """Two experts, lists of one: expert 0 wins with probability Phi(gap / (sqrt(2) std))."""
    count, std, gap = 2000, 0.1, 0.1
    options = {
        "dim": 2,
        "num_experts": 2,
        "top_k": 1,
        "num_codewords": count,
        "shortlist_size": 1,
        "jitter_std": std,
        "dead_below": 0.0,
    }
    router = Case("air", options).build()
    with torch.no_grad():
        router.centroids.copy_(torch.eye(2))
    angle = math.pi / 4 - math.asin(gap / math.sqrt(2))
    set_codebook(router, torch.tensor([[math.cos(angle), math.sin(angle)]]).repeat(count, 1))
    router.freeze_codebook()
    hidden = tokens(5, 2, 1)
    route(router, hidden, "train")
    first = router.shortlists().clone().flatten()
    assert torch.equal(router.rebuild_shortlists().flatten(), first)
    wins = 0.5 * (1 + math.erf(gap / (math.sqrt(2) * std) / math.sqrt(2)))
    error = math.sqrt(wins * (1 - wins) / count)
    assert abs((first == 0).float().mean().item() - wins) < 5 * error
    router.on_parameters_changed()
    router.observe(hidden)
    second = router.shortlists().flatten()
    agree = wins**2 + (1 - wins) ** 2
    error = math.sqrt(agree * (1 - agree) / count)
    assert abs((first == second).float().mean().item() - agree) < 5 * error
