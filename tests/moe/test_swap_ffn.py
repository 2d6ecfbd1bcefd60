"""Dense networks as experts: with all of them the model is the same, with K the K best neurons."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import airmoe
from airmoe import FfnExperts, MoELayer, RouterConfig, swap_ffn
from tests.moe.dense_models import (
    DIM,
    GEMMAS,
    NEURONS,
    SILU,
    air,
    dense,
    exact,
    ids,
    layer_of,
    logits_of,
)

ROUTERS = {"exact": exact(), "air": air()}


def error_of(actual: Tensor, reference: Tensor) -> float:
    return float((actual.double() - reference).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("family", [*SILU, *GEMMAS])
def test_all_neurons_are_the_dense_model(family: str, router: str, dtype: torch.dtype) -> None:
    model, wide = dense(family, dtype), dense(family, torch.float64)
    wide.load_state_dict(model.state_dict())
    expected, reference = logits_of(model), logits_of(wide)
    made = swap_ffn(model, layers=[0, 2], router=ROUTERS[router], from_dense=True)
    assert [layer_of(model, index) for index in (0, 2)] == made
    assert all(isinstance(layer, MoELayer) and layer.post_norm is None for layer in made)
    assert not isinstance(layer_of(model, 1), MoELayer)
    actual = logits_of(model)
    assert actual.dtype == dtype
    # Neurons are summed in another order: as near the truth as the dense model, to a few last bits.
    floor = 2 * torch.finfo(dtype).eps * float(reference.abs().max())
    assert error_of(actual, reference) <= 2 * error_of(expected, reference) + floor


@pytest.mark.parametrize("router", ["exact", "air"])
@pytest.mark.parametrize("training", [False, True])
def test_gradients_with_all_neurons_are_the_dense_model_s(router: str, training: bool) -> None:
    """Jitter included: it moves scores, and with K = E scores do not matter."""
    model = dense(dtype=torch.float64)
    twin = copy.deepcopy(model)
    (layer,) = swap_ffn(model, layers=[1], router=ROUTERS[router], from_dense=True)
    for one in (model, twin):
        one.train(training)(ids(), labels=ids()).loss.backward()
    network = layer_of(twin, 1)
    assert layer.training is training
    pairs = [
        (layer.experts.gate, network.gate_proj.weight.grad),
        (layer.experts.up, network.up_proj.weight.grad),
        (layer.experts.down, network.down_proj.weight.grad.T),
        (model.model.embed_tokens.weight, twin.model.embed_tokens.weight.grad),
    ]
    for parameter, expected in pairs:
        assert isinstance(parameter, torch.nn.Parameter) and parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)
    centroids: Any = layer.router.centroids
    assert not centroids.requires_grad and centroids.grad is None


@pytest.mark.parametrize("top_k", [1, 20, NEURONS])
@pytest.mark.parametrize("make", [exact, air])
def test_k_neurons_are_those_with_the_largest_gates(
    make: Callable[..., RouterConfig], top_k: int
) -> None:
    model = dense(dtype=torch.float64)
    network = copy.deepcopy(layer_of(model, 1))
    (layer,) = swap_ffn(model, layers=[1], router=make(top_k), from_dense=True)
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    gate = network.gate_proj(x)
    chosen = torch.zeros_like(gate).scatter(-1, gate.topk(top_k).indices, 1.0)
    expected = network.down_proj(chosen * network.act_fn(gate) * network.up_proj(x))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-12)
    centroids: Any = layer.router.centroids
    assert torch.equal(centroids, network.gate_proj.weight)


def test_exact_gelu_is_taken_over() -> None:
    for family, option in (("Llama", "hidden_act"), ("Gemma2", "hidden_activation")):
        model = dense(family, torch.float64, **{option: "gelu"})
        expected = logits_of(model)
        (layer,) = swap_ffn(model, layers=[1], router=exact(), from_dense=True)
        assert layer.experts.activation == "geglu"
        torch.testing.assert_close(logits_of(model), expected, rtol=1e-9, atol=1e-12)


def test_groups_of_neurons() -> None:
    model = dense(dtype=torch.float64)
    expected = logits_of(model)
    gate = layer_of(model, 0).gate_proj.weight.detach().clone()
    experts = FfnExperts(expert_size=6)
    (layer,) = swap_ffn(model, layers=[0], router=air(8, 8, 8), experts=experts, from_dense=True)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(layer.router.centroids, gate.view(8, 6, DIM).mean(1))


def test_the_default_takes_a_quarter_of_the_neurons_from_half_of_them() -> None:
    model = dense()
    (layer,) = swap_ffn(model, layers=[1], from_dense=True)
    config: Any = layer.router.config
    assert (config.top_k, config.shortlist_size, config.num_experts) == (12, 24, NEURONS)
    assert (config.gate, config.normalize_centroids, config.dim) == ("binary", False, DIM)
    weights = layer.router(torch.randn(5, DIM)).to_token_routing().weights
    assert torch.equal(weights, torch.ones(5, 12))


def test_memory_is_taken_over_and_frozen_weights_stay_frozen() -> None:
    model = dense()
    network = layer_of(model, 1)
    network.up_proj.weight.requires_grad_(False)
    (layer,) = swap_ffn(model, layers=[1], router=exact(), from_dense=True)
    assert layer.experts.gate is not None and layer.experts.gate.requires_grad
    assert not layer.experts.up.requires_grad
    assert layer.experts.gate.data_ptr() == network.gate_proj.weight.data_ptr()
    assert torch.equal(layer.experts.down, network.down_proj.weight.T)


def test_torch_s_default_device_does_not_matter() -> None:
    """Somebody may have set it for their own tensors; the layer lives where the model does."""
    model = dense()
    expected = logits_of(model)
    with torch.device("meta"):
        swap_ffn(model, layers=[1], router=air(), from_dense=True)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-5, atol=1e-6)


# -- before and after calibration -----------------------------------------------------------------


def test_until_calibrated_air_is_exact_and_says_so() -> None:
    model, twin = dense(), dense()
    options = {"top_k": 8, "shortlist_size": 12}
    (layer,) = swap_ffn(model, layers=[1], router=air(**options), from_dense=True)
    swap_ffn(twin, layers=[1], router=exact(top_k=8), from_dense=True)
    with warnings.catch_warnings():  # calibration itself is no reason to complain
        warnings.simplefilter("error")
        airmoe.calibrate(copy.deepcopy(model), [ids(seed, batch=8) for seed in range(8)])
    with pytest.warns(UserWarning, match="not calibrated: every expert is scored"):
        actual = logits_of(model)
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        assert torch.equal(logits_of(model), actual)
    torch.testing.assert_close(actual, logits_of(twin), rtol=1e-5, atol=1e-6)
    report = airmoe.calibrate(model, [ids(seed, batch=8) for seed in range(8)])
    assert 0 < report.layers[0].overlap < 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated = logits_of(model)
    assert not torch.allclose(calibrated, logits_of(twin), rtol=1e-5, atol=1e-6)
    router: Any = layer.router
    hidden = torch.randn(30, DIM)
    pools = router.shortlists()[router.codebook.assign(hidden)]  # [T, M]
    chosen = router(hidden).to_token_routing().expert_ids  # [T, K]
    assert (chosen.unsqueeze(-1) == pools.unsqueeze(1)).any(-1).all()


def test_one_notice_per_model_whoever_listens() -> None:
    model = dense()
    for index in (0, 1, 2):
        (layer,) = swap_ffn(model, layers=[index], from_dense=True)
        layer.router.register_forward_hook(lambda *_: None)  # say, for a balance loss
    with pytest.warns(UserWarning, match="not calibrated") as caught:
        _ = [logits_of(model) for _ in range(2)]
    assert len(caught) == 1


def test_uncalibrated_projected_centroids_are_exact_too() -> None:
    model, twin = dense(), dense()
    form = {"normalize_centroids": True, "top_k": 8}
    swap_ffn(model, layers=[1], router=air(shortlist_size=12, **form), from_dense=True)
    swap_ffn(twin, layers=[1], router=exact(**form), from_dense=True)
    with pytest.warns(UserWarning, match="not calibrated"):
        actual = logits_of(model)
    torch.testing.assert_close(actual, logits_of(twin), rtol=1e-5, atol=1e-6)


def test_training_teaches_the_codebook() -> None:
    model = dense().train()
    (layer,) = swap_ffn(model, layers=[1], router=air(8, shortlist_size=12), from_dense=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not calibrated")
        model(ids(batch=8), labels=ids(batch=8)).loss.backward()
        assert bool(layer.router.codebook.initialized)  # type: ignore[union-attr]
        logits_of(model)


# -- new experts ----------------------------------------------------------------------------------


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
