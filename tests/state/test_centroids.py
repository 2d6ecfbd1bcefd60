"""Centroids: projected for use, never in place; what is derived from them follows them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.state.common import (
    DIM,
    EXPERTS,
    batch,
    build_layer,
    build_router,
    plain_shortlists,
    tracked_layer,
)

PROJECTING = ["air", "air-expert-choice", "hierarchical", "topk", "expert_choice"]


def other_centroids(seed: int) -> Tensor:
    """Of other lengths too: a norm that is kept too long shows."""
    return 3 * torch.randn(EXPERTS, DIM, generator=torch.Generator().manual_seed(seed))


def right_answer(layer: Any, centroids: Tensor) -> Tensor:
    """Of a layer that never had other centroids."""
    fresh = build_layer(jitter_std=0.0)
    state = {name: value for name, value in layer.state_dict().items() if "lists" not in name}
    fresh.load_state_dict(state | {"router.centroids": centroids})
    fresh.router.freeze_codebook()
    with torch.no_grad():
        return fresh.train(layer.training)(batch(1))


def evaluated() -> Any:
    """A layer in evaluation whose lists are made."""
    layer = build_layer(jitter_std=0.0)
    with torch.no_grad():
        layer(batch(0))
        layer.eval()(batch(1))
    return layer


@torch.no_grad()
def test_functional_call_in_evaluation() -> None:
    layer = evaluated()
    before = layer(batch(1))
    for seed in range(4):  # each takes the memory that the one before has left
        centroids = other_centroids(seed)
        expected = right_answer(layer, centroids)
        found = functional_call(layer, {"router.centroids": centroids}, (batch(1),))
        assert torch.equal(found, expected)
    assert torch.equal(layer(batch(1)), before)


def edit(router: Any, centroids: Tensor) -> None:
    router.centroids.copy_(centroids)


def set_data(router: Any, centroids: Tensor) -> None:
    router.centroids.data = centroids.clone()


def set_parameter(router: Any, centroids: Tensor) -> None:
    router.centroids = nn.Parameter(centroids.clone())


@pytest.mark.parametrize("put", [edit, set_data, set_parameter])
@torch.no_grad()
def test_other_weights_in_evaluation(put: Callable[[Any, Tensor], None]) -> None:
    layer = evaluated()
    put(layer.router, other_centroids(0))
    assert torch.equal(layer(batch(1)), right_answer(layer, other_centroids(0)))


def tracked(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A layer in training, its lists made, its codebook at rest."""
    layer, router, optimizer = tracked_layer(jitter_std=0.0, **options)
    layer(batch(0)).square().sum().backward()
    router.freeze_codebook()
    return layer, optimizer


@pytest.mark.parametrize("put", [edit, set_data, set_parameter])
def test_other_weights_between_two_steps(put: Callable[[Any, Tensor], None]) -> None:
    """Sharpness-aware training, noise on weights."""
    layer, _ = tracked(refresh_every=3)
    with torch.no_grad():
        put(layer.router, other_centroids(0))
    assert torch.equal(layer(batch(1)), right_answer(layer, other_centroids(0)))
    assert torch.equal(layer.router.shortlists(), plain_shortlists(layer.router))


@pytest.mark.parametrize("training", [True, False])
def test_two_sets_of_weights_before_one_backward(training: bool) -> None:
    """Lists are rewritten in place, but not while a backward wants them."""
    layer, _ = tracked()
    layer.train(training)

    def gradients(together: bool) -> list[Tensor]:
        given = [other_centroids(seed).requires_grad_() for seed in (0, 1)]
        losses = []
        for centroids in given:
            output = functional_call(layer, {"router.centroids": centroids}, (batch(1),))
            losses.append(output.pow(3).sum())
            if not together:
                losses[-1].backward()
        if together:
            (losses[0] + losses[1]).backward()
        return [centroids.grad for centroids in given if centroids.grad is not None]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(found, expected)


def test_copies_derive_their_own() -> None:
    layer = evaluated()
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for fork in (copy.deepcopy(layer), torch.load(saved, weights_only=False)):
        with torch.no_grad():
            assert torch.equal(fork(batch(1)), layer(batch(1)))
            fork.router.centroids.copy_(other_centroids(0))
            assert torch.equal(fork(batch(1)), right_answer(fork, other_centroids(0)))


# -- projection onto the sphere ---------------------------------------------------------------


@pytest.mark.parametrize("case", PROJECTING)
def test_training_never_overwrites_the_parameter(case: str) -> None:
    layer = build_layer(case)
    centroids = layer.router.centroids
    with torch.no_grad():
        centroids.mul_(torch.linspace(0.3, 3.0, centroids.shape[0]).unsqueeze(-1))
    layer.router.on_parameters_changed()
    before, identity, address = centroids.detach().clone(), centroids, centroids.data_ptr()
    for index in range(3):
        layer.train()
        layer(batch(index)).sum().backward()
        layer.eval()
        layer(batch(index))
    assert layer.router.centroids is identity and centroids.data_ptr() == address
    assert torch.equal(centroids, before)


@pytest.mark.parametrize("case", PROJECTING)
def test_a_zero_centroid_gives_no_nan(case: str) -> None:
    layer = build_layer(case)
    with torch.no_grad():
        layer.router.centroids[3].zero_()
    layer.router.on_parameters_changed()
    output = layer.forward_with_routing(batch(0))
    (output.hidden.square().sum() + output.routing.expert_probs.square().sum()).backward()
    assert output.hidden.isfinite().all()
    assert layer.router.centroids.grad.isfinite().all()


@pytest.mark.parametrize("case", PROJECTING)
def test_the_default_init_has_unit_norm_and_xavier_is_an_option(case: str) -> None:
    unit = build_router(case).centroids
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(unit.shape[0]))
    xavier = build_router(case, centroid_init="xavier").centroids
    bound = (6 / (xavier.shape[0] + xavier.shape[1])) ** 0.5
    assert xavier.abs().max() <= bound and xavier.abs().max() > 0.9 * bound
