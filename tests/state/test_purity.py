"""`forward` changes nothing; noise depends on the counters alone."""

from __future__ import annotations

import pytest
import torch

import airmoe
from tests.conformance.common import dense_weights
from tests.state.common import (
    CASES,
    assert_same,
    batch,
    build_layer,
    build_router,
    snapshot,
    tracked_layer,
)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_forward_changes_no_state_and_repeats_itself(
    case: str, training: bool, tracked: bool
) -> None:
    router = build_router(case)
    if tracked:
        optimizer = torch.optim.SGD(router.parameters(), 0.1)
        airmoe.track_optimizer(router, optimizer)
    hidden = batch(0, 22)
    router.observe(hidden)
    router.train(training)
    before, random = snapshot(router, derived=training), torch.get_rng_state()
    first = dense_weights(router(hidden))
    between = dense_weights(router(batch(1, 22)))
    again = dense_weights(router(hidden))
    assert torch.equal(first, again)
    assert not torch.equal(first, between)
    assert_same(snapshot(router, derived=training), before)
    assert torch.equal(torch.get_rng_state(), random), "a router's forward draws from a generator"


@pytest.mark.parametrize("case", CASES)
def test_evaluation_has_no_jitter_and_observes_nothing(case: str) -> None:
    layer = build_layer(case, jitter_std=1.0)
    layer(batch(0)).sum().backward()
    calm = build_layer(case, jitter_std=0.0)
    calm.load_state_dict(layer.state_dict())
    layer.eval()
    calm.eval()
    before = snapshot(layer, derived=False)
    assert torch.equal(layer(batch(1)), calm(batch(1)))
    assert_same(snapshot(layer, derived=False), before)
    layer.train()
    calm.train()
    assert not torch.equal(layer(batch(1)), calm(batch(1)))


@pytest.mark.parametrize("case", CASES)
def test_the_default_device_does_not_matter(case: str) -> None:
    layers = [build_layer(case) for _ in range(2)]
    x, states = batch(0), []
    for layer, device in zip(layers, ("cpu", "meta"), strict=True):
        with torch.device(device):
            torch.manual_seed(1)
            layer(x).pow(3).sum().backward()
        states.append({**snapshot(layer), "random": torch.get_rng_state()})
    assert_same(states[1], states[0])


def test_a_training_forward_nobody_observed_leaves_the_next_rebuild_alone() -> None:
    """Peeking after a step must not use up the refresh that belongs to the next observe."""
    pairs = [tracked_layer(), tracked_layer()]
    for layer, _, optimizer in pairs:
        layer(batch(0)).square().sum().backward()
        optimizer.step()
    peeked, other = (router for _, router, _ in pairs)
    peeked(batch(5, 22))
    peeked.observe(batch(1, 22))
    other.observe(batch(1, 22))
    assert torch.equal(peeked.shortlists(), other.shortlists())
