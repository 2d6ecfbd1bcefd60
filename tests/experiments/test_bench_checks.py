"""`airmoe bench` gives a wrong answer no time, and passes the right ones in all dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from airmoe.experiments.bench.cases import CASES, PAPER
from airmoe.experiments.bench.checks import check
from airmoe.experiments.bench.contenders import Air, Air16Times, Answer, BalancedAir, Contender
from airmoe.experiments.bench.inputs import Dtype, Inputs, Shape, make_inputs
from airmoe.experiments.bench.measure import measure
from airmoe.experiments.bench.plain import Listing, PeerPackage
from airmoe.experiments.bench.results import Result
from airmoe.experiments.bench.timing import Limits
from airmoe.experiments.bench.work import Ceilings
from airmoe.kernels.backend import use_backend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = replace(PAPER.toy(), num_tokens=128, dim=32)
CONTENDERS = dict.fromkeys(kind for case in CASES.values() for kind in case.contenders)


def measured(kind: type[Contender], shape: Shape = SMALL) -> Result:
    ceilings = Ceilings("float32", 1e12, 1e12)
    return measure(kind, shape, "training", DEVICE, ceilings, Limits(repeats=1))


@pytest.mark.parametrize("dtype", get_args(Dtype))
@pytest.mark.parametrize("kind", CONTENDERS)
def test_right_answers_pass_in_every_dtype(kind: type[Contender], dtype: Dtype) -> None:
    form = "swiglu"
    if kind is PeerPackage:
        form = "gelu"
        pytest.importorskip("PEER_pytorch")
        if dtype != "float32":
            pytest.skip("its own precision is not ours to judge")
    shape = replace(SMALL, dtype=dtype, cells="zipf", activation=form)
    inputs = make_inputs(shape, DEVICE, seed=1)
    with use_backend("reference"):
        found = check(kind(inputs), inputs.batches[0], inputs.cotangent)
    assert not found.problems
    assert found.num_tokens == 32
    assert 0 < found.worst_share <= 1
    assert found.experts_per_token == (1 if kind.key == "coarse" else 32)
    names = [deviation["what"] for deviation in found.deviations]
    assert names[:2] == ["output", "gradient of hidden"]
    assert (names[-1] == "output with jitter") != kind.plain
    tables = [name for name in names if "gate" in name or "up" in name or "down" in name]
    assert len(tables) >= (3 if form == "swiglu" else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("cells", ["even", "zipf"])
def test_triton_passes(cells: Any) -> None:
    result = measured(Air, Shape(4096, 128, 4096, 64, 64, 256, cells=cells))
    assert (result.status, result.backend, result.captured) == ("timed", "triton", True)
    assert "without CUDA graph" in result.apart_ms


def no_router_gradient(layer: Listing, hidden: Tensor, answer: Answer) -> Answer:
    """Right output, but weights cut off from the centroids."""
    _, ids, weights = layer.route(hidden)
    return replace(answer, output=layer.run_experts(hidden, ids, weights.detach()))


def worse_expert(layer: Listing, hidden: Tensor, answer: Answer) -> Answer:
    """Takes the candidate after the K-th instead of the K-th."""
    order = layer.scores(hidden, layer.parameters(), answer.cells).argsort(dim=-1, descending=True)
    ids = torch.cat([order[..., : SMALL.top_k - 1], order[..., [SMALL.top_k]]], dim=-1)
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


def test_shortlists_of_other_centroids_are_wrong() -> None:
    class Stale(Listing):
        def __init__(self, inputs: Inputs) -> None:
            super().__init__(inputs)
            self.shortlists = self.shortlists.roll(1, 0)

    result = measured(Stale)
    assert result.status == "wrong" and "shortlist: one is" in result.reason


def test_an_output_that_does_not_fit_the_jittered_weights_is_wrong() -> None:
    class Wrong(Air):
        def answer(self, hidden: Tensor) -> Answer:
            answer = super().answer(hidden)
            return replace(answer, output=answer.output * (1.0001 if self.module.training else 1))

    result = measured(Wrong)
    assert result.status == "wrong" and "output with jitter: error" in result.reason


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotImplementedError("no such kernel\nand more"), "failed",
         "NotImplementedError: no such kernel"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0"),
         "out of memory", "out of memory, needs about 64 GiB"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_a_result(error: Exception, status: str, reason: str) -> None:
    class Raising(Listing):
        def answer(self, hidden: Tensor) -> Answer:
            raise error

    result = measured(Raising)
    assert (result.status, result.reason) == (status, reason)


def test_a_layer_that_cannot_be_built_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PEER_pytorch", None)
    result = measured(PeerPackage)
    assert result.status == "skipped" and "pip install 'airmoe[bench]'" in result.reason


def test_the_balance_loss_has_a_gradient_too() -> None:
    gradients, inputs = [], make_inputs(SMALL, DEVICE)
    for kind in (Air, BalancedAir):
        contender = kind(inputs)
        output = contender.forward(inputs.batches[0])
        contender.backward(output, torch.zeros_like(output))
        grad = contender.router.centroids.grad
        gradients.append(0.0 if grad is None else grad.abs().sum().item())
    assert gradients[0] == 0 < gradients[1]


def test_more_experts_for_the_same_tokens() -> None:
    given = make_inputs(SMALL, DEVICE)
    built = Air16Times(given)
    assert built.inputs.batches is given.batches
    assert built.parameters()["up"].shape == (16 * SMALL.num_experts, SMALL.dim)
