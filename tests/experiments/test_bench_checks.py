"""`airmoe bench` gives a wrong answer no time, and passes the right ones in all dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from airmoe.experiments.bench import contenders
from airmoe.experiments.bench.cases import CASES, Dtype, Shape, toy
from airmoe.experiments.bench.checks import check
from airmoe.experiments.bench.contenders import (
    Air,
    Answer,
    BalancedAir,
    Contender,
    Hierarchical,
    Listing,
    PeerPackage,
)
from airmoe.experiments.bench.entries import ENTRIES, Entry, backend
from airmoe.experiments.bench.inputs import Inputs, make_inputs
from airmoe.experiments.bench.measure import Result, Setting, measure
from airmoe.experiments.bench.timing import Ceilings, Limits, Timer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = replace(toy(CASES["paper"]).shape, num_tokens=128, dim=32)
INPUTS = make_inputs(SMALL, DEVICE, seed=3)


def measured(
    build: Callable[[Inputs], Contender],
    backend: Any = None,
    experts_times: int = 1,
    shape: Shape = SMALL,
) -> Result:
    inputs = INPUTS if shape is SMALL else make_inputs(shape, DEVICE, seed=0)
    entry = Entry("tested", "tested", "baseline", build, Shape.air, backend, experts_times)
    ceilings = Ceilings("float32", 1e12, 1e12)
    return measure(entry, Setting(inputs, "training", Timer(DEVICE), ceilings, Limits(repeats=1)))


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("key", [key for key in ENTRIES if key != "air-triton"])
def test_right_answers_pass_in_every_dtype(key: str, dtype: Dtype) -> None:
    if key == "peer-pytorch":
        pytest.importorskip("PEER_pytorch")
        if dtype != "float32":
            pytest.skip("its own precision is not ours to judge")
    entry = ENTRIES[key]
    form = "gelu" if key == "peer-pytorch" else "swiglu"
    shape = replace(SMALL, dtype=dtype, cells="zipf", activation=form)
    inputs = entry.inputs(make_inputs(shape, DEVICE, seed=1))
    with backend(entry, inputs):
        found = check(entry.build(inputs), inputs.batches[0], inputs.cotangent)
    assert not found.problems
    assert found.num_tokens == 32
    assert 0 < found.worst_share <= 1
    assert found.experts_per_token == (1 if key == "coarse" else 32)
    names = [deviation.what for deviation in found.deviations]
    assert names[:2] == ["output", "gradient of hidden"]
    tables = [name for name in names if "gate" in name or "up" in name or "down" in name]
    assert len(tables) >= (3 if form == "swiglu" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("cells", ["even", "zipf"])
def test_triton_passes(cells: Any) -> None:
    shape = Shape(4096, 128, 4096, 64, 64, 256, cells=cells)
    inputs = make_inputs(shape, DEVICE, seed=1)
    entry = ENTRIES["air-triton"]
    with backend(entry, inputs) as used:
        assert used == "triton"
        found = check(entry.build(inputs), inputs.batches[0], inputs.cotangent)
    assert not found.problems


def no_router_gradient(layer: Listing, hidden: Tensor, answer: Answer) -> Answer:
    """Right output, but weights cut off from the centroids."""
    ids, weights = layer.module.route(hidden)
    return replace(answer, output=layer.module.run_experts(hidden, ids, weights.detach()))


def worse_expert(layer: Listing, hidden: Tensor, answer: Answer) -> Answer:
    """Takes the candidate after the K-th instead of the K-th."""
    order = layer.scores(hidden, layer.values(), answer.cells).argsort(dim=-1, descending=True)
    ids = torch.cat([order[..., : layer.top_k - 1], order[..., [layer.top_k]]], dim=-1)
    return replace(answer, expert_ids=ids)


def nan_in_one_token(_layer: Listing, _hidden: Tensor, answer: Answer) -> Answer:
    """Not among those looked at closely."""
    spoilt = torch.zeros_like(answer.output)
    spoilt[1] = torch.nan
    return replace(answer, output=answer.output + spoilt)


def leaking_gradient(layer: Listing, hidden: Tensor, answer: Answer) -> Answer:
    """Right output, but the gradient of each token also reaches the one before it."""
    neighbours = hidden.roll(-1, 0)
    return Listing.answer(layer, hidden + neighbours - neighbours.detach())


def same_expert_twice(_layer: Listing, _hidden: Tensor, answer: Answer) -> Answer:
    ids = answer.expert_ids.clone()
    ids[..., -1] = ids[..., 0]
    return replace(answer, expert_ids=ids)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda _, __, a: replace(a, output=a.output * 1.0001), "output: error"),
        (nan_in_one_token, "output: not finite"),
        (no_router_gradient, "gradient of centroids: error"),
        (leaking_gradient, "gradient of hidden: error"),
        (worse_expert, "below the last of the best 32"),
        (lambda _, __, a: replace(a, expert_ids=a.expert_ids[..., :-1]), "31 experts per token"),
        (same_expert_twice, "experts: chosen twice"),
        (lambda _, __, a: replace(a, cells=(a.cells + 1) % SMALL.num_codewords), "cells: one is"),
    ],
)
def test_a_wrong_contender_gets_no_time_but_its_error(
    spoil: Callable[[Listing, Tensor, Answer], Answer], complaint: str
) -> None:
    class Wrong(Listing):
        def answer(self, hidden: Tensor) -> Answer:
            return spoil(self, hidden, super().answer(hidden))

    result = measured(Wrong)
    assert result.status == "wrong", result.reason
    assert complaint in result.reason
    content = result.as_json()
    assert content["check"]["problems"]
    assert not content["forward_ms"] and not content["total_ms"] and "median" not in content


def stale_shortlists(inputs: Inputs) -> Listing:
    """Centroids moved, shortlists did not."""
    built = Listing(inputs)
    with torch.no_grad():
        built.module.centroids.copy_(built.module.centroids.roll(1, 0))
    return built


def less_jitter_than_said(inputs: Inputs) -> Air:
    built = Air(inputs)
    built.jitter_std *= 2
    return built


@pytest.mark.parametrize(
    ("build", "backend", "complaint"),
    [
        (stale_shortlists, None, "shortlist: one is"),
        (less_jitter_than_said, "reference", "expected 2.00e-02"),
    ],
)
def test_wrong_state_is_found(
    build: Callable[[Inputs], Contender], backend: Any, complaint: str
) -> None:
    result = measured(build, backend)
    assert result.status == "wrong" and complaint in result.reason


class Greedy(Listing):
    """Has memory for half of the batch only."""

    seen: list[int] = []  # noqa: RUF012

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(hidden.shape[0])
        return super().forward(hidden)

    def answer(self, hidden: Tensor) -> Answer:
        if hidden.shape[0] > SMALL.num_tokens // 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0")
        return super().answer(hidden)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_only_plain_layers_are_run_in_parts(backend: Any) -> None:
    Greedy.seen.clear()
    result, lack = measured(Greedy, backend), "out of memory, needs about 64 GiB"
    if backend is not None:
        assert (result.status, result.reason, result.parts) == ("out of memory", lack, 1)
        return
    assert (result.status, result.parts, result.backend) == ("timed", 2, "plain PyTorch")
    assert result.reason == f"in one part {lack}"
    assert set(Greedy.seen) == {SMALL.num_tokens // 2}
    (forward,), (total,) = result.forward_ms, result.total_ms
    assert 0 < forward < total
    assert result.as_json()["median"] == {"forward_ms": forward, "total_ms": total}


def test_a_crash_is_a_result() -> None:
    def build(_inputs: Inputs) -> Contender:
        raise NotImplementedError("no such kernel\nand more")

    result = measured(build)
    assert (result.status, result.reason) == ("failed", "NotImplementedError: no such kernel")


def test_who_cannot_be_built_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(Hierarchical, "auto", shape=replace(SMALL, num_codewords=2))
    assert result.status == "skipped"
    assert "do not add up" in result.reason
    monkeypatch.setattr(contenders, "find_spec", lambda _name: None)
    result = measured(PeerPackage)
    assert result.status == "skipped"
    assert "pip install" in result.reason


def test_the_balance_loss_has_a_gradient_too() -> None:
    gradients = []
    for build in (Air, BalancedAir):
        contender = build(INPUTS)
        output = contender.forward(INPUTS.batches[0])
        contender.backward(output, torch.zeros_like(output))
        grad = contender.router.centroids.grad
        gradients.append(0.0 if grad is None else grad.abs().sum().item())
    assert gradients[0] == 0 < gradients[1]


def test_more_experts_for_the_same_tokens() -> None:
    built: list[Inputs] = []

    def build(inputs: Inputs) -> Contender:
        built.append(inputs)
        return Air(inputs)

    result = measured(build, "reference", experts_times=4)
    assert result.status == "timed", result.reason
    assert built[0].shape.num_experts == 4 * SMALL.num_experts
    assert built[0].batches is INPUTS.batches
    assert result.parameter_bytes == 4 * 4 * SMALL.num_experts * SMALL.dim * 4
