"""A checkpoint holds everything needed to go on, and nothing derived."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import airmoe
from tests.state.common import (
    CASES,
    air_of,
    assert_same,
    batch,
    build_block,
    build_layer,
    build_router,
    plain_shortlists,
    routers_of,
    snapshot,
    tracked_layer,
)


def test_an_air_router_saves_its_parameters_codebook_and_counters_only() -> None:
    assert set(build_router("air").state_dict()) == {
        "centroids",
        "noise_seed",
        "micro_batches",
        "codebook.codewords",
        "codebook.counts",
        "codebook.sums",
        "codebook.initialized",
        "codebook.seed",
        "codebook.updates",
    }


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> list[dict[str, Tensor]]:
    """Two micro-batches per step; everything after each step, routing noise included."""
    states = []
    for step in steps:
        outputs = {}
        for index in range(2):
            output = model(batch(2 * step + index))
            outputs[f"output{index}"] = output.detach()
            output.pow(3).sum().backward()
        for number, router in enumerate(routers_of(model)):
            key = router.plan(router.read(batch(0, 1))).noise_key
            assert key is not None
            outputs[f"key{number}"] = key
        optimizer.step()
        states.append({**snapshot(model), **outputs})
        optimizer.zero_grad()
    return states


@pytest.mark.parametrize("tracked", ["before", "after", "never"])
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(
    case: str, tracked: str, tmp_path: Path
) -> None:
    """`tracked`: whether the optimizer is tracked before or after the checkpoint is loaded."""
    if tracked == "before" and "air" not in case:
        pytest.skip("only shortlists care about tracking")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without a tracked optimizer")
        model = build_block(case)
        optimizer = optimizer_of(model)
        if tracked != "never":
            airmoe.track_optimizer(model, optimizer)
        train(model, optimizer, range(0, 2))
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        moments, random = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
        expected = train(model, optimizer, range(2, 5))

        fresh = build_block(case, seed=77)
        optimizer = optimizer_of(fresh)
        if tracked == "before":
            airmoe.track_optimizer(fresh, optimizer)
            fresh(batch(50))  # whatever it did before the load must not matter
        fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
        optimizer.load_state_dict(moments)
        if tracked == "after":
            airmoe.track_optimizer(fresh, optimizer)
        torch.set_rng_state(random)
        assert_same(train(fresh, optimizer, range(2, 5)), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_refreshes_lists_in_both_modes(assign: bool) -> None:
    """Also in the middle of a window, and also when tensors are replaced instead of copied."""
    source = build_layer("air", seed=5, jitter_std=0.0)
    source(batch(0))
    layer, router, _optimizer = tracked_layer(jitter_std=0.0)
    layer(batch(1))
    layer.eval()
    layer(batch(1))
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    layer.load_state_dict(state, assign=assign)
    assert torch.equal(router.shortlists(), plain_shortlists(router))
    layer.train()
    assert torch.equal(router.shortlists(), plain_shortlists(router))
    source.eval()
    layer.eval()
    assert torch.equal(layer(batch(2)), source(batch(2)))


@pytest.mark.parametrize("case", CASES)
def test_meta_construction_then_reset_gives_a_working_layer(case: str) -> None:
    with torch.device("meta"):
        layer = build_layer(case)
    assert all(tensor.is_meta for tensor in [*layer.parameters(), *layer.buffers()])
    layer.to_empty(device="cpu")
    torch.manual_seed(4)
    for module in layer.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    for name, tensor in layer.state_dict().items():
        assert tensor.isfinite().all(), name
        assert tensor.dtype != torch.int64 or (tensor < torch.iinfo(torch.int64).max).all(), name
    layer(batch(0)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    layer.eval()
    assert layer(batch(1)).isfinite().all()
    if "air" in case:
        codebook = air_of(layer).codebook
        assert bool(codebook.initialized) and int(codebook.updates) == 1


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_meta_construction_then_load_equals_the_saved_model(case: str, assign: bool) -> None:
    source = build_layer(case)
    source(batch(0))
    with torch.device("meta"):
        layer = build_layer(case, seed=8)
    if not assign:
        layer.to_empty(device="cpu")
    layer.load_state_dict(copy.deepcopy(source.state_dict()), strict=True, assign=assign)
    for model in (source, layer):
        torch.manual_seed(1)
        model(batch(1)).square().sum().backward()
    assert_same(snapshot(layer, derived=False), snapshot(source, derived=False))
    layer.eval()
    source.eval()
    assert torch.equal(layer(batch(2)), source(batch(2)))
