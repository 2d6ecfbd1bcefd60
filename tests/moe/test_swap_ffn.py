"""New experts in the place of dense networks."""

from __future__ import annotations

import pytest
import torch

import airmoe
from airmoe import FfnExperts, MoELayer, swap_ffn
from tests.moe.dense_models import DIM, GEMMAS, SILU, air, dense, ids, layer_of, logits_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layers_take_the_place_of_the_networks(dtype: torch.dtype) -> None:
    model = dense(dtype=dtype)
    made = swap_ffn(model, layers=[0, 2], router=air())
    assert [layer_of(model, index) for index in (0, 2)] == made
    assert all(isinstance(layer, MoELayer) and not layer.training for layer in made)
    assert not isinstance(layer_of(model, 1), MoELayer)
    assert logits_of(model).dtype == dtype


def test_torch_s_default_device_does_not_matter() -> None:
    """Somebody may have set it for their own tensors; the layer lives where the model does."""
    model = dense()
    with torch.device("meta"):
        swap_ffn(model, layers=[1], router=air())
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert torch.isfinite(logits_of(model)).all()


def test_calibration_fits_the_codebook() -> None:
    model = dense()
    (layer,) = swap_ffn(model, layers=[1], router=air(8, shortlist_size=12))
    report = airmoe.calibrate(model, [ids(seed, batch=8) for seed in range(8)])
    assert 0 < report.layers[0].overlap < 1
    assert bool(layer.router.codebook.initialized)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", [*SILU, *GEMMAS])
def test_new_experts_train(family: str) -> None:
    model = dense(family)
    router = airmoe.AirRouter.Config.for_budget(dim=DIM, num_experts=64, top_k=8)
    (layer,) = swap_ffn(model, layers=[1], router=router)
    assert layer.post_norm is not None and layer.experts.activation == "swiglu"
    std = float(layer.experts.up.detach().std())
    assert 0.19 < std < 0.21  # initializer_range
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    airmoe.track_optimizer(model, optimizer)
    losses = []
    for _ in range(8):
        loss = model.train()(ids(batch=8), labels=ids(batch=8)).loss
        loss.backward()
        assert all(weight.grad is not None for weight in layer.parameters())
        optimizer.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    assert torch.isfinite(logits_of(model)).all()


@pytest.mark.parametrize("name", ["peer", "hierarchical", "topk"])
def test_any_router_that_lets_tokens_choose(name: str) -> None:
    model = dense()
    config = airmoe.ROUTERS[name].Config.for_budget(dim=DIM, num_experts=64, top_k=8)
    experts = FfnExperts(expert_size=2, activation="geglu")
    (layer,) = swap_ffn(model, layers=[2], router=config, experts=experts, post_norm="none")
    x = torch.randn(2, 5, DIM)
    output = layer.eval().forward_with_routing(x)
    direct = layer.experts(x.view(-1, DIM), output.routing)
    assert torch.equal(output.hidden.view(-1, DIM), direct)
    assert (layer.experts.expert_size, layer.experts.activation) == (2, "geglu")
    assert isinstance(layer.router, airmoe.ROUTERS[name])
