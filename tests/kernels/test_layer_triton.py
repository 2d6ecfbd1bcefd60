"""Whole layers: every router on Triton gives the layer of the reference, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import airmoe
from airmoe.kernels.backend import use_backend
from airmoe.moe import CoarseExperts
from airmoe.moe import experts as experts_module
from tests.kernels.comparison import DEVICE, assert_no_worse

# Interpreted kernels take their time for every expert and token, PEER's most.
ON_GPU = DEVICE == "cuda"
DIM, EXPERTS, TOP_K = (32, 256, 16) if ON_GPU else (32, 64, 8)
OPTIONS: dict[str, dict[str, int]] = {
    "air": {"num_codewords": 4, "shortlist_size": 4 * TOP_K},
    "peer": {"num_heads": 2},
    "hierarchical": {"num_clusters": 4, "num_selected_clusters": 1},
}
LENGTHS = {} if ON_GPU else {"peer": 6}  # of sequences


def make_layer(name: str) -> airmoe.MoELayer:
    make_config: Any = airmoe.ROUTERS[name].Config
    config = make_config(dim=DIM, num_experts=EXPERTS, top_k=TOP_K, **OPTIONS.get(name, {}))
    experts = airmoe.GranularExperts(EXPERTS, DIM)
    return airmoe.MoELayer(config.build(), experts).to(DEVICE)


def step(layer: airmoe.MoELayer, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """One training micro-batch with a balance loss."""
    layer = copy.deepcopy(layer).to(x.dtype).train()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    found = layer.forward_with_routing(x, mask)
    weights = torch.linspace(-1, 1, DIM, dtype=x.dtype, device=DEVICE)
    loss = (found.hidden * weights).sum() + airmoe.load_balance_loss(found.routing)
    loss.backward()
    grads = {f"grad {n}": p.grad for n, p in layer.named_parameters() if p.grad is not None}
    counts = found.routing.expert_counts.to(x.dtype)
    assert x.grad is not None
    return {"output": found.hidden.detach(), "counts": counts, "grad x": x.grad} | grads


def check_step(layer: airmoe.MoELayer, *shape: int) -> None:
    x = torch.randn(*shape, DIM, device=DEVICE)
    mask = torch.rand(shape, device=DEVICE) > 0.1
    mask[0, 0] = False
    with use_backend("reference"):
        exact, plain = step(layer, x.double(), mask), step(layer, x, mask)
    with use_backend("triton"):
        fast = step(layer, x, mask)
    assert torch.equal(fast["counts"].double(), exact["counts"])
    # With one cluster chosen its score moves nothing: that gradient is rounding, 0 in truth.
    tiny = [key for key, value in exact.items() if value.abs().max() < 1e-12]
    for found in (fast, plain, exact):
        for key in tiny:
            del found[key]
    assert_no_worse(fast, plain, exact)


@pytest.mark.filterwarnings("ignore:AirRouter runs with gradients")
@pytest.mark.parametrize("name", airmoe.ROUTERS)
def test_a_training_step(name: str) -> None:
    check_step(make_layer(name), 2, LENGTHS.get(name, 20))


@pytest.mark.filterwarnings("ignore:AirRouter runs with gradients")
def test_shortlists_longer_than_registers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("routers.air", "kernels.top_k"):
        monkeypatch.setattr(f"airmoe.{module}.LONGEST_ROW", 16)
    test_a_training_step("air")


@pytest.mark.filterwarnings("ignore:AirRouter runs with gradients")
@pytest.mark.parametrize("frozen", ["router", "all but one"])
@pytest.mark.parametrize("name", ["air", "topk"])
def test_gradients_of_what_is_not_frozen(name: str, frozen: str) -> None:
    """The input needs no gradient either, so that operators have little to give back."""
    layer, x = make_layer(name).train(), torch.randn(5, DIM, device=DEVICE)
    everything = copy.deepcopy(layer)
    for part, parameter in layer.named_parameters():
        fixed = part != "experts.up" if frozen == "all but one" else part.startswith(frozen)
        parameter.requires_grad_(not fixed)
    for one in (layer, everything):
        torch.manual_seed(1)
        with use_backend("triton"):
            one(x).square().sum().backward()
    wanted = dict(everything.named_parameters())
    for part, parameter in layer.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, part
        else:
            torch.testing.assert_close(parameter.grad, wanted[part].grad, msg=part)


@pytest.mark.parametrize("tokens", [2, 40])
def test_coarse_experts(tokens: int) -> None:
    """Their gates are one number per token, spread over its neurons without a copy."""
    config = airmoe.TopKRouter.Config(dim=DIM, num_experts=8, top_k=2)
    experts = CoarseExperts(8, DIM, expert_size=5)
    check_step(airmoe.MoELayer(config.build(), experts).to(DEVICE), 1, tokens)


@pytest.mark.filterwarnings("ignore:AirRouter runs with gradients")
def test_a_nan_in_the_router_shows() -> None:
    layer = make_layer("air").eval()
    with torch.no_grad():
        dict(layer.router.named_parameters())["centroids"].fill_(torch.nan)
        for backend in ("reference", "triton"):
            with use_backend(backend):
                assert layer(torch.randn(3, DIM, device=DEVICE)).isnan().any(), backend


def test_tables_in_any_layout() -> None:
    layer = make_layer("air").eval()
    x = torch.randn(70, DIM, device=DEVICE)
    with torch.no_grad(), use_backend("triton"):
        wanted = layer(x)
        for name in ("gate", "up", "down"):
            table = getattr(layer.experts, name)
            table.data = table.data.mT.contiguous().mT  # the same numbers, columns first
        torch.testing.assert_close(layer(x), wanted)


def test_probabilities_of_an_earlier_moment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In large batches of half precision scores are made again when somebody reads them."""
    monkeypatch.setattr("airmoe.kernels.cell_scores.MANY_ROWS", 0)
    layer = make_layer("air").half().train()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    airmoe.track_optimizer(layer, optimizer)
    with use_backend("triton"):
        found = layer.forward_with_routing(torch.randn(30, DIM, device=DEVICE).half())
        found.hidden.sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="centroids have changed"):
            _ = found.routing.expert_probs


@pytest.mark.parametrize("tokens", [1, 7])
def test_few_tokens_without_gradients_fetch_their_experts(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = make_layer("air").eval(), torch.randn(1, tokens, DIM, device=DEVICE)
    with torch.no_grad(), use_backend("triton"):
        few = layer(x)
        monkeypatch.setattr(experts_module, "SMALL_BATCH", 0)
        torch.testing.assert_close(few, layer(x))
