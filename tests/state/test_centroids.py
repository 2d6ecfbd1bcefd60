"""Centroids: projected onto the sphere for use, never in place, with the norm's gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import airmoe
from tests.state.common import batch, build_layer, build_router, dense

PROJECTING = ["air", "air-expert-choice", "hierarchical", "topk", "expert_choice"]


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
def test_only_the_direction_of_a_centroid_matters(case: str) -> None:
    router, scaled = build_router(case), build_router(case)
    with torch.no_grad():
        scaled.centroids.mul_(2.0 ** torch.randint(-3, 4, (scaled.centroids.shape[0], 1)))
    scaled.on_parameters_changed()
    hidden = batch(0, 22)
    for each in (router, scaled):
        each.observe(hidden)
    torch.testing.assert_close(dense(router(hidden)), dense(scaled(hidden)))


def loss_of(routing: airmoe.Routing) -> Tensor:
    probe = torch.linspace(-1, 1, routing.num_tokens * routing.num_experts)
    return (dense(routing) * probe.view(routing.num_tokens, -1)).sum() + (
        routing.expert_probs * probe[: routing.num_experts]
    ).sum()


@pytest.mark.parametrize("case", PROJECTING)
def test_gradients_are_tangent_to_the_sphere_and_shrink_with_the_norm(case: str) -> None:
    """<w, dL/dw> = 0 and dL/d(2w) = dL/dw / 2: what differentiating through w/|w| gives."""
    gradients = []
    for scale in (1.0, 2.0):
        router = build_router(case)
        with torch.no_grad():
            router.centroids.mul_(scale)
        router.on_parameters_changed()
        router.observe(batch(0, 22))
        loss_of(router(batch(0, 22))).backward()
        gradient = router.centroids.grad
        assert gradient is not None and gradient.abs().max() > 1e-3
        radial = (gradient * router.centroids.detach()).sum(-1)
        assert radial.abs().max() < 1e-5 * gradient.norm(dim=-1).max() * scale * 10
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1], gradients[0] / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", PROJECTING)
def test_without_projection_the_norm_counts(case: str) -> None:
    router = build_router(case, normalize_centroids=False)
    router.observe(batch(0, 22))
    loss_of(router(batch(0, 22))).backward()
    radial = (router.centroids.grad * router.centroids.detach()).sum(-1)
    assert radial.abs().max() > 1e-3


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


@pytest.mark.parametrize("case", ["air", "hierarchical", "topk", "expert_choice"])
def test_the_default_init_has_unit_norm_and_xavier_is_an_option(case: str) -> None:
    unit = build_router(case).centroids
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(unit.shape[0]))
    xavier = build_router(case, centroid_init="xavier").centroids
    bound = (6 / (xavier.shape[0] + xavier.shape[1])) ** 0.5
    assert xavier.abs().max() <= bound and xavier.abs().max() > 0.9 * bound
