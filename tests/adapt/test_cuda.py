"""Swapped models on a GPU: Triton's kernels answer like the CPU (`make test-gpu`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import airmoe
from airmoe import swap_ffn
from tests.adapt.models import (
    BATCHES,
    BUILD,
    EXPERTS,
    air,
    build,
    calibrated,
    dense,
    ids,
    swap,
    swapped_routers,
)

pytestmark = pytest.mark.gpu
GPU = "cuda"


@torch.no_grad()
def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return model.eval()(tokens.to(GPU)).logits.cpu()


@pytest.mark.parametrize("family", BUILD)
def test_with_all_experts_nothing_changes(family: str) -> None:
    expected = logits(build(family).to(GPU), ids(1))
    found = logits(calibrated(family, size=EXPERTS).to(GPU), ids(1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", BUILD)
def test_shortlists_route_as_on_the_cpu(family: str) -> None:
    here = calibrated(family)
    there = copy.deepcopy(here).to(GPU)
    hidden = torch.randn(200, here.config.hidden_size)
    for router, copied in zip(swapped_routers(here), swapped_routers(there), strict=True):
        expected, found = router(hidden), copied(hidden.to(GPU))
        torch.testing.assert_close(found[0].cpu(), expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(
            found[2].cpu().sort(-1).values, expected[2].sort(-1).values, rtol=0, atol=0
        )


@pytest.mark.parametrize("family", BUILD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calibrate_train_and_generate(family: str, dtype: torch.dtype) -> None:
    model = build(family).to(GPU, dtype)
    swap(model)
    batches = [batch.to(GPU) for batch in BATCHES]
    report = airmoe.calibrate(model, batches, passes=3)
    assert all(layer.overlap > 0.5 for layer in report.layers)  # 8 of 16 experts
    model.train()(batches[0], labels=batches[0]).loss.backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads)
    answer = model.eval().generate(batches[0][:1], max_new_tokens=4, do_sample=False)
    assert answer.shape == (1, batches[0].shape[1] + 4)


def test_compiled() -> None:
    model = calibrated("mixtral").to(GPU)
    expected = logits(model, ids(1))
    found = logits(torch.compile(model), ids(1))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_layers_in_the_place_of_dense_networks() -> None:
    here = dense()
    swap_ffn(here, layers=[1], router=air())
    there = copy.deepcopy(here).to(GPU)
    with torch.no_grad():
        expected = here(ids()).logits
    torch.testing.assert_close(logits(there, ids()), expected, rtol=1e-4, atol=1e-4)
