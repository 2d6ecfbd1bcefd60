"""What every router of `ROUTERS` promises; a new router is tested as soon as it is listed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor

from airmoe import (
    ROUTERS,
    GranularExperts,
    MoELayer,
    Router,
    Routing,
    load_balance_loss,
    track_optimizer,
)

DIM, EXPERTS, TOP_K = 16, 64, 8


def build(name: str) -> Router:
    config = ROUTERS[name].Config.for_budget(dim=DIM, num_experts=EXPERTS, top_k=TOP_K)
    return config.build()


def dense_weights(routing: Routing) -> Tensor:
    """[T, E]"""
    listed = routing.to_token_routing()
    weights = torch.zeros(routing.num_tokens, EXPERTS)
    return weights.scatter_add(1, listed.expert_ids, listed.weights.detach())


def states(router: Router) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in router.state_dict().items()}


@pytest.fixture(params=sorted(ROUTERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_forward_is_pure_and_jitter_belongs_to_the_micro_batch(name: str) -> None:
    router, hidden = build(name), torch.randn(29, DIM)
    router.observe(hidden)
    before = states(router)
    first, again = (router(hidden).to_token_routing().weights for _ in range(2))
    assert torch.equal(first, again)
    assert all(torch.equal(before[key], value) for key, value in router.state_dict().items())
    router.observe(hidden)
    assert not torch.equal(first, router(hidden).to_token_routing().weights)


def test_masked_tokens_are_as_if_absent(name: str) -> None:
    router, hidden = build(name).eval(), torch.randn(29, DIM)
    mask = torch.rand(29) < 0.6
    padded, alone = router(hidden, mask), router(hidden[mask])
    assert torch.equal(padded.expert_counts, alone.expert_counts)
    torch.testing.assert_close(padded.expert_probs, alone.expert_probs)
    torch.testing.assert_close(padded.log_z[mask], alone.log_z)
    assert (dense_weights(padded)[~mask] == 0).all()
    torch.testing.assert_close(dense_weights(padded)[mask], dense_weights(alone))


def test_statistics_are_distributions(name: str) -> None:
    routing = build(name)(torch.randn(50, DIM))
    torch.testing.assert_close(routing.expert_probs.sum(), torch.tensor(1.0))
    listed = routing.to_token_routing()
    used = listed.expert_ids[listed.weights > 0]
    assert torch.equal(routing.expert_counts, torch.bincount(used, minlength=EXPERTS))


def test_a_few_steps_reduce_the_loss(name: str) -> None:
    layer = MoELayer(build(name), GranularExperts(EXPERTS, DIM))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    track_optimizer(layer, optimizer)
    x, target = torch.randn(2, 64, DIM), torch.randn(2, 64, DIM)
    losses = []
    for _ in range(12):
        output = layer.forward_with_routing(x)
        error = (output.hidden - target).square().mean()
        (error + 0.01 * load_balance_loss(output.routing)).backward()
        assert all(weight.grad is not None for weight in layer.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(error.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_state_travels(name: str) -> None:
    """Loaded into a fresh router, the answer is the same: jitter, codebook and all."""
    router, hidden = build(name), torch.randn(40, DIM)
    router.observe(hidden)
    other = build(name)
    other.load_state_dict(router.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for copied in (other, copy.deepcopy(router)):
            mine, theirs = router(hidden).to_token_routing(), copied(hidden).to_token_routing()
            assert torch.equal(mine.expert_ids, theirs.expert_ids)
            assert torch.equal(mine.weights, theirs.weights)


def test_single_tokens_give_what_the_batch_gives(name: str) -> None:
    """As in generation, also for tokens that are masked or not finite."""
    layer = MoELayer(build(name), GranularExperts(EXPERTS, DIM))
    x, mask = torch.randn(1, 9, DIM), torch.ones(1, 9, dtype=torch.bool)
    layer(x)
    layer.eval()
    x[0, 3], mask[0, 5] = torch.nan, False
    with torch.no_grad():
        whole = layer.forward_with_routing(x, mask)
        if whole.routing.experts_choose:  # so a token's experts depend on the others
            return
        alone = [layer(x[:, place : place + 1], mask[:, place : place + 1]) for place in range(9)]
    torch.testing.assert_close(torch.cat(alone, 1), whole.hidden, equal_nan=True)
