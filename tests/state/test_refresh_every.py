"""Shortlists that live several optimizer steps; everything else follows every step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import airmoe
from airmoe import MoELayer
from tests.conformance.common import dense_weights
from tests.state.common import (
    air_of,
    batch,
    build_block,
    build_layer,
    plain_shortlists,
    tracked_layer,
)


@pytest.mark.parametrize("normalize", [True, False])
def test_lists_wait_for_their_turn_and_norms_do_not(normalize: bool) -> None:
    options = {"normalize_centroids": normalize, "refresh_every": 3}
    layer, router, optimizer = tracked_layer(jitter_std=0.0, **options)
    expected, rebuilt = torch.empty(0), []
    for step in range(8):
        for part in range(2):  # micro-batches
            layer(batch(2 * step + part)).pow(3).sum().backward()
            now = plain_shortlists(router)
            if step % 3 == 0 and part == 0:
                expected = now
                rebuilt.append(router.built_at is not None and int(router.built_at))
            assert torch.equal(router.training_lists.experts, expected), (step, part)
            if normalize:
                norms = router.centroids.detach().norm(dim=-1)
                torch.testing.assert_close(router.training_lists.inverse_norms, 1 / norms)
            assert step % 3 == 0 or not torch.equal(now, expected), "too small a step for a test"
        optimizer.step()
        optimizer.zero_grad()
    assert rebuilt == [1, 7, 13]  # micro-batches of steps 0, 3 and 6


def rebuilt_after(layer: MoELayer, steps: list[torch.optim.Optimizer]) -> list[int]:
    """The steps before which lists were built, when these optimizers step in this order."""
    router, found = air_of(layer), []
    for step, optimizer in enumerate(steps):
        layer(batch(step)).pow(3).sum().backward()
        if int(router.built_at or 0) == step + 1:  # micro-batches are counted from 1
            found.append(step)
        optimizer.step()
    return found


@pytest.mark.parametrize("lifetime", [1, 2, 4])
def test_tracking_again_counts_no_step_twice(lifetime: int) -> None:
    block = build_block("air", refresh_every=lifetime)
    optimizer = torch.optim.AdamW(block.parameters())
    wrapped = SimpleNamespace(optimizer=optimizer)
    for model in (block.layer, block, block, block.layer.router):
        airmoe.track_optimizer(model, optimizer)
        airmoe.track_optimizer(model, wrapped)
    assert rebuilt_after(block.layer, [optimizer] * 9) == [*range(0, 9, lifetime)]


def test_every_tracked_optimizer_of_the_centroids_counts_and_no_other() -> None:
    layer = build_layer("air", refresh_every=4)
    first = torch.optim.AdamW(layer.parameters())
    second = torch.optim.SGD([air_of(layer).centroids], 0.1)
    others = torch.optim.SGD(layer.experts.parameters(), 0.1)
    airmoe.track_optimizer(layer, first)
    handle = airmoe.track_optimizer(layer, second)
    assert rebuilt_after(layer, [first, others, second, others, first, second, others]) == [0, 6]
    handle.remove()
    assert air_of(layer).tracked
    layer(batch(7))
    assert air_of(layer).lists_due == "nothing"
    second.step()  # no longer tracked
    assert air_of(layer).lists_due != "lists"


def test_scores_are_exact_under_old_lists() -> None:
    """A token's chosen experts are the best of its list, weighed by today's centroids."""
    layer, router, optimizer = tracked_layer(jitter_std=0.0, refresh_every=100)
    for step in range(3):
        layer(batch(step)).pow(3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    routing = layer.forward_with_routing(batch(9)).routing
    hidden = batch(9).flatten(0, -2)
    logits = router.full_logits(hidden)
    lists = router.training_lists.experts[router.codebook.assign(hidden)]
    chosen = logits.gather(1, lists).topk(router.config.top_k).indices
    wanted = torch.zeros_like(logits).scatter(1, lists.gather(1, chosen), 1.0)
    weights = logits.masked_fill(wanted == 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(dense_weights(routing), weights)


def test_loading_brings_the_lists_and_changes_by_hand_do_not_wait() -> None:
    layer, router, _optimizer = tracked_layer(jitter_std=0.0, refresh_every=100)
    layer(batch(0))
    other, other_router, _other_optimizer = tracked_layer(seed=1, jitter_std=0.0, refresh_every=100)
    other(batch(1))
    expected = other_router.shortlists().clone()
    assert router.tracked and router.lists_due == "nothing"
    layer.load_state_dict(other.state_dict())
    layer(batch(2))
    assert torch.equal(router.training_lists.experts, expected)
    assert not torch.equal(expected, plain_shortlists(router))
    without = {k: v for k, v in other.state_dict().items() if "training_lists" not in k}
    layer.load_state_dict(without, strict=False)
    layer(batch(2))
    assert torch.equal(router.training_lists.experts, plain_shortlists(router))
    with torch.no_grad():
        router.centroids.neg_()
    router.on_parameters_changed()
    layer(batch(3))
    assert torch.equal(router.training_lists.experts, plain_shortlists(router))
