"""Float32 state and results do not depend on torch's default dtype, bit for bit.

Besides factories, a quotient of whole numbers and a bool times a float take that default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import airmoe
from tests.model.common import VARIANTS
from tests.model.common import batch as ids
from tests.model.common import build as build_model
from tests.state.common import CASES, assert_same, batch, build_layer, build_router, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:codebook:UserWarning"),
    pytest.mark.filterwarnings("ignore:AirRouter runs with gradients:UserWarning"),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64]),
]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES = [batch(index) for index in range(3)]


def train_layer(layer: Any) -> dict[str, Tensor]:
    """Three micro-batches with odd numbers of tokens, an empty one among them."""
    losses = []
    for index, rows in enumerate((7, 0, 11)):
        output = layer.forward_with_routing(STATES[index][:, :rows])
        loss = airmoe.load_balance_loss(output.routing) + airmoe.load_balance_loss(
            output.routing, total_tokens=torch.tensor(37)
        )
        losses.append(loss.detach())
        (output.hidden.square().sum() + loss).backward()
    return snapshot(layer) | {"losses": torch.stack(losses)}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_learns_the_same(case: str, dtype: torch.dtype) -> None:
    layers = [build_layer(case) for _ in range(2)]
    expected = train_layer(layers[0])
    with default(dtype):
        found = train_layer(layers[1])
    assert_same(found, expected)


def train_model(model: Any) -> dict[str, Tensor]:
    output = model.train()(ids(0), labels=ids(0), num_items_in_batch=torch.tensor(70))
    output.loss.backward()
    return snapshot(model) | {"loss": output.loss.detach()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_learns_the_same(variant: str, dtype: torch.dtype) -> None:
    models = [build_model(variant, router_z_weight=0.1) for _ in range(2)]
    for model in models:
        if variant == "dense":  # a head that is called, and not only multiplied by
            torch.manual_seed(1)
            model.lm_head = torch.nn.Linear(16, 53)
    expected = train_model(models[0])
    with default(dtype):
        found = train_model(models[1])
    assert_same(found, expected)


def test_a_layer_built_in_another_dtype_has_a_float32_codebook(dtype: torch.dtype) -> None:
    """Hugging Face builds models under `torch.set_default_dtype(config.dtype)`."""
    with default(dtype):
        layer = build_layer("air")
        assert layer(batch(0).to(dtype)).dtype == dtype
    router = layer.router
    assert router.centroids.dtype == dtype
    state = [getattr(router.codebook, name) for name in ("codewords", "counts", "sums")]
    assert {x.dtype for x in (*state, router.training_lists.inverse_norms)} == {torch.float32}


@pytest.mark.parametrize("case", ["air", "air-raw-centroids"])
def test_metrics_measure_the_same(case: str, dtype: torch.dtype) -> None:
    router, hidden = build_router(case, top_k=3), batch(0, 50)
    router.observe(hidden)
    router.eval()
    measures = ("overlap", "mass_recall", "mass_recall_bound")

    def measured() -> dict[str, Tensor]:
        return {name: getattr(airmoe.metrics, name)(router, hidden) for name in measures}

    expected = measured()
    with default(dtype):
        assert_same(measured(), expected)
