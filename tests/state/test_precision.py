"""Codebook and routing are float32 whatever happens to the model around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import airmoe
from airmoe import CellRouting
from tests.conformance.common import dense_weights
from tests.state.common import (
    CASES,
    air_of,
    assert_same,
    batch,
    build_layer,
    build_router,
    snapshot,
)

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "float64": lambda module: module.to(torch.float64),
    "bfloat16 and back": lambda module: module.bfloat16().float(),
    "to another tensor": lambda module: module.to(torch.zeros((), dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casting_a_model_leaves_every_bit_of_the_codebook(cast: str) -> None:
    layer = build_layer("air")
    for index in range(3):
        layer(batch(index))
    before = snapshot(air_of(layer).codebook)
    model = CASTS[cast](nn.Sequential(nn.Linear(8, 8), layer))
    assert_same(snapshot(air_of(model).codebook), before)
    assert air_of(model).training_lists.inverse_norms.dtype == torch.float32
    if "back" not in cast:
        assert air_of(model).centroids.dtype != torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_cast_router_routes_like_a_float32_one_with_the_same_rounded_numbers(
    case: str, dtype: torch.dtype
) -> None:
    """Rounding happens to the stored numbers only, never to a score, weight or statistic."""
    cast = build_router(case, jitter_std=0.0).to(dtype)
    wide = build_router(case, jitter_std=0.0)
    rounded = batch(0, 22).to(dtype)
    with torch.no_grad():
        for parameter, source in zip(wide.parameters(), cast.parameters(), strict=True):
            parameter.copy_(source)
    wide.on_parameters_changed()
    found = []
    for router, hidden in ((cast, rounded), (wide, rounded.float())):
        router.observe(hidden)
        routing = router(hidden)
        if isinstance(routing, CellRouting):
            assert routing.gates.dtype == torch.float32
        found.append((dense_weights(routing), routing.log_z, routing.expert_probs))
    assert {tensor.dtype for tensor in found[0]} == {torch.float32}
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("case", "backward_inside"),
    [
        *((case, False) for case in CASES),
        # Queries and cluster scores are torch's own products, whose backward follows autocast.
        *((case, True) for case in CASES if case not in ("peer", "hierarchical")),
    ],
)
def test_autocast_does_not_touch_routing(case: str, backward_inside: bool, training: bool) -> None:
    """The same hidden states give the same bits of routing, gradient, codebook and shortlists."""

    def run(autocast: bool) -> list[Any]:
        router = build_router(case, num_experts=100)
        optimizer = torch.optim.SGD(router.parameters(), 0.5)
        airmoe.track_optimizer(router, optimizer)
        routings = []
        for index in range(3):
            hidden = batch(index, 300).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                router.train()
                router.observe(hidden)
                router.train(training)
                weights = dense_weights(router(hidden))
                if backward_inside:
                    weights.square().sum().backward()
            if not backward_inside:
                weights.square().sum().backward()
            assert hidden.grad is not None and weights.dtype == torch.float32
            routings += [weights, hidden.grad]
            optimizer.step()
        return [snapshot(router), *routings]

    assert_same(run(autocast=True), run(autocast=False))


def test_assigned_state_is_float32_again() -> None:
    router = build_router()
    router.observe(batch(0, 40))
    rounded = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in router.state_dict().items()
    }
    router.load_state_dict(rounded, assign=True)
    assert router.codebook.codewords.dtype == torch.float32
    assert torch.equal(router.codebook.codewords, rounded["codebook.codewords"].float())
