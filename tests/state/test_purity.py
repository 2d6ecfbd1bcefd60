"""`forward` changes nothing; noise depends on the counters alone."""

from __future__ import annotations

import warnings

import pytest
import torch

import airmoe
from tests.state.common import (
    CASES,
    air_of,
    assert_same,
    batch,
    build_layer,
    build_router,
    dense,
    snapshot,
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
    first = dense(router(hidden))
    between = dense(router(batch(1, 22)))
    again = dense(router(hidden))
    assert torch.equal(first, again)
    assert not torch.equal(first, between)
    assert_same(snapshot(router, derived=training), before)
    assert torch.equal(torch.get_rng_state(), random), "a router's forward draws from a generator"


@pytest.mark.parametrize("case", CASES)
def test_forwards_do_not_move_later_micro_batches(case: str) -> None:
    """A run with extra forwards (metrics, generation) between observes equals one without."""

    def run(extra: int) -> torch.Tensor:
        router = build_router(case)
        seen = []
        for index in range(3):
            hidden = batch(index, 22)
            for _ in range(extra):
                router(hidden)
                router.eval()
                router(hidden)
                router.train()
            router.observe(hidden)
            seen.append(dense(router(hidden)).detach())
        return torch.stack(seen)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without a tracked optimizer")
        assert torch.equal(run(0), run(2))


@pytest.mark.parametrize("case", [case for case in CASES if "air" in case])
def test_learning_does_not_shift_the_jitter(case: str) -> None:
    """The codebook draws replacements and first tokens, and must not use up token noise."""
    learning, frozen = build_router(case, dead_below=50.0), build_router(case)
    frozen.freeze_codebook()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(4):
            learning.observe(batch(index, 22))
            frozen.observe(batch(index, 22))
    assert torch.equal(learning.micro_batches, frozen.micro_batches)
    assert torch.equal(learning.current_noise_key(), frozen.current_noise_key())
    assert int(learning.codebook.updates) == 4
    assert int(frozen.codebook.updates) == 0


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


def test_a_training_forward_nobody_observed_leaves_the_next_rebuild_alone() -> None:
    """Peeking after a step must not use up the refresh that belongs to the next observe."""
    layers = [build_layer("air"), build_layer("air")]
    for layer in layers:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.3)
        airmoe.track_optimizer(layer, optimizer)
        layer(batch(0)).square().sum().backward()
        optimizer.step()
    peeked, other = (air_of(layer) for layer in layers)
    peeked(batch(5, 22))
    peeked.observe(batch(1, 22))
    other.observe(batch(1, 22))
    assert torch.equal(peeked.shortlists(), other.shortlists())
