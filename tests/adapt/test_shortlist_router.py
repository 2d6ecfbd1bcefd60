"""Swapped routers in other number formats, with other kernels and other experts."""

from __future__ import annotations

import copy

import pytest
import torch

import airmoe
from tests.adapt.models import (
    BATCHES,
    BUILD,
    EXPERTS,
    build,
    calibrated,
    fitted,
    gradients,
    logits_of,
    stock_routers,
    swap,
    swapped_routers,
)


@pytest.mark.parametrize("family", BUILD)
def test_bfloat16_routes_in_float32(family: str) -> None:
    model = calibrated(family).to(torch.bfloat16)
    stock = airmoe.restore_routers(copy.deepcopy(model))
    for router, plain in zip(swapped_routers(model), stock_routers(stock), strict=True):
        assert router.codebook.codewords.dtype == router.codebook.scales.dtype == torch.float32
        hidden = torch.randn(30, router.hidden_dim).to(torch.bfloat16)
        logits, weights, chosen = router(hidden)
        exact = hidden.double() @ router.weight.double().T
        if router.expert_bias is not None:
            exact = exact + router.expert_bias.double()
        inside = logits.isfinite()
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits[inside], exact[inside].float(), rtol=0, atol=1e-5)
        expected = router.select(exact.float().masked_fill(~inside, -torch.inf), torch.bfloat16)
        assert torch.equal(chosen.sort(-1).values, expected[1].sort(-1).values)
        assert weights.dtype == plain(hidden)[1].dtype
    assert logits_of(model).isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(model.train()).values())


def test_a_bfloat16_model_can_be_calibrated() -> None:
    model = build("deepseek_v3").to(torch.bfloat16)
    swap(model)
    report = airmoe.calibrate(model, BATCHES, passes=3)
    assert swapped_routers(model)[0].codebook.codewords.dtype == torch.float32
    expected = airmoe.calibrate(calibrated("deepseek_v3"), BATCHES, passes=3)
    for ours, theirs in zip(report.layers, expected.layers, strict=True):
        assert ours.overlap == pytest.approx(theirs.overlap, abs=0.1)


@pytest.mark.parametrize("family", BUILD)
def test_a_float64_model(family: str) -> None:
    model = build(family).double()
    model.set_experts_implementation("eager")  # grouped products know no float64
    found, expected = logits_of(fitted(model)), logits_of(calibrated(family))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-5)


def test_no_tokens() -> None:
    for family in BUILD:
        logits, weights, chosen = swapped_routers(calibrated(family))[0](torch.empty(0, 32))
        assert logits.shape == (0, EXPERTS) and weights.shape == chosen.shape == (0, 2)


def test_autocast_routes_in_float32() -> None:
    model = calibrated("mixtral")
    router = swapped_routers(model)[0]
    hidden = torch.randn(20, 32)
    expected = router(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = router(hidden)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", BUILD)
def test_experts_implementations(family: str, implementation: str) -> None:
    model, stock = calibrated(family, size=EXPERTS), build(family)
    short = calibrated(family)
    expected = logits_of(short)
    for one in (model, stock, short):
        one.set_experts_implementation(implementation)
        assert one.config._experts_implementation == implementation
    torch.testing.assert_close(logits_of(model), logits_of(stock), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits_of(short), expected, rtol=0, atol=1e-5)
