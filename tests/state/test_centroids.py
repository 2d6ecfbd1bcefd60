"""Centroids: projected onto the sphere for use, never in place, with the norm's gradient."""

from __future__ import annotations

import pytest
import torch

from tests.state.common import batch, build_layer, build_router

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
