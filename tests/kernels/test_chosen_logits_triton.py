"""Logits of chosen experts in Triton: values and gradients equal the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.chosen_logits import chosen_logits
from tests.kernels.comparison import DEVICE, DTYPES, Found, assert_as_good, captured

pytest.importorskip("triton")
from airmoe.kernels import chosen_logits_triton, rows_triton
from airmoe.kernels.chosen_logits_triton import chosen_logits_op


@dataclass(frozen=True)
class Case:
    tokens: int
    count: int
    dim: int
    experts: int
    popular: int = 0  # places of every list that hold expert 1
    aligned: float = 0.0  # how much of every row is one common direction

    def inputs(self, dtype: torch.dtype, experts_dtype: torch.dtype | None = None) -> Found:
        ids = torch.randint(self.experts, (self.tokens, self.count))
        ids[:, : self.popular] = 1
        common = self.aligned * torch.randn(self.dim)
        hidden = common + torch.randn(self.tokens, self.dim)
        table = (common + torch.randn(self.experts, self.dim)) / 8
        table[-1] = 0
        found = {"hidden": hidden.to(dtype), "experts": table.to(experts_dtype or dtype)}
        return {name: tensor.to(DEVICE) for name, tensor in (found | {"ids": ids}).items()}


CASES = {
    "odd": Case(tokens=5, count=21, dim=37, experts=9),
    "one each": Case(tokens=6, count=1, dim=16, experts=4),
    "unused rows": Case(tokens=2, count=3, dim=20, experts=15),
    "several column blocks": Case(tokens=3, count=18, dim=300, experts=7),
    "popular": Case(tokens=9, count=12, dim=24, experts=6, popular=7),
    "aligned": Case(tokens=30, count=4, dim=33, experts=6, aligned=30),
    "popular and aligned": Case(tokens=9, count=8, dim=24, experts=3, popular=6, aligned=30),
    "no tokens": Case(tokens=0, count=4, dim=16, experts=3),
    "empty lists": Case(tokens=3, count=0, dim=16, experts=3),
}
named = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
normalized = pytest.mark.parametrize("normalize", [True, False], ids=["unit", "plain"])


@pytest.fixture
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 16 entries are summed in parts, as those of a large batch are."""
    monkeypatch.setattr(rows_triton, "PART_ENTRIES", 16)


def logits_of(normalize: bool) -> Callable[[Found], Found]:
    def logits(given: Found) -> Found:
        tensors = given["hidden"], given["experts"], given["ids"]
        return {"logits": chosen_logits(*tensors, normalize=normalize)}

    return logits


@named
@dtypes
@normalized
@pytest.mark.usefixtures("_short_parts")
def test_values_and_gradients_equal_the_reference(
    case: Case, dtype: torch.dtype, normalize: bool
) -> None:
    assert_as_good(logits_of(normalize), case.inputs(dtype))


@normalized
@pytest.mark.parametrize("hidden_dtype", DTYPES, ids=str)
def test_operands_of_several_dtypes(hidden_dtype: torch.dtype, normalize: bool) -> None:
    for experts_dtype in DTYPES:
        assert_as_good(logits_of(normalize), CASES["odd"].inputs(hidden_dtype, experts_dtype))


def test_values_are_those_of_the_formula() -> None:
    given = CASES["odd"].inputs(torch.float32)
    hidden, experts = given["hidden"].double(), given["experts"].double()
    norms = experts.norm(dim=-1)
    wanted = (hidden @ experts.T / norms.where(norms > 0, torch.inf)).gather(-1, given["ids"])
    for backend in ("triton", "reference"):
        with use_backend(backend):
            found = chosen_logits(given["hidden"], given["experts"], given["ids"], normalize=True)
        assert found.dtype == torch.float32
        assert (found - wanted).abs().max() <= 1e-5
        assert (found[given["ids"] == experts.shape[0] - 1] == 0).all()


def test_a_zero_row_has_no_gradient() -> None:
    given = CASES["odd"].inputs(torch.float32)
    experts = given["experts"].requires_grad_()
    with use_backend("triton"):
        logits = chosen_logits(given["hidden"], experts, given["ids"], normalize=True)
    (grad,) = torch.autograd.grad(logits.sum(), experts)
    assert (given["ids"] == 8).any() and (grad[8] == 0).all()
    assert (grad[:8] != 0).any()


@pytest.mark.gpu
@dtypes
@normalized
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=1000, count=77, dim=200, experts=999, popular=9),
        Case(tokens=4000, count=512, dim=256, experts=4096, popular=1, aligned=10),
        Case(tokens=129, count=33, dim=1030, experts=50),
        Case(tokens=70, count=9, dim=4096, experts=60),
        Case(tokens=3, count=5000, dim=64, experts=100_000),
    ],
    ids=str,
)
def test_large_shapes(case: Case, dtype: torch.dtype, normalize: bool) -> None:
    assert_as_good(logits_of(normalize), case.inputs(dtype))


def test_strided_operands_and_short_ids() -> None:
    inputs = CASES["odd"].inputs(torch.float32)
    with use_backend("triton"):
        wanted = logits_of(True)(inputs)["logits"]
        strided = {name: tensor.T.contiguous().T for name, tensor in inputs.items()}
        found = logits_of(True)(strided | {"ids": strided["ids"].int()})["logits"]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("frozen", ["hidden", "experts"])
def test_frozen_operands_cost_nothing(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CASES["odd"].inputs(torch.float32)
    free = "hidden" if frozen == "experts" else "experts"
    monkeypatch.setattr(
        chosen_logits_triton, "table_grads" if frozen == "experts" else "row_totals", None
    )

    def logits(given: Found) -> Found:
        both = given | {frozen: inputs[frozen].to(given[free].dtype), "ids": inputs["ids"]}
        return logits_of(True)(both)

    assert_as_good(logits, {free: inputs[free]})


@normalized
@pytest.mark.usefixtures("_short_parts")
def test_the_operator_compiles_and_repeats_itself(normalize: bool) -> None:
    inputs = CASES["popular"].inputs(torch.float32)
    floats = [inputs[name].requires_grad_() for name in ("hidden", "experts")]

    def function(hidden: Tensor, experts: Tensor) -> Tensor:
        return chosen_logits_op(hidden, experts, inputs["ids"], normalize)

    def run(function: Callable[..., Tensor]) -> tuple[Any, ...]:
        value = function(*floats)
        return value, *torch.autograd.grad(value.sin().sum(), floats)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for plain, again, found in zip(run(function), run(function), run(compiled), strict=True):
        assert torch.equal(found, plain) and torch.equal(again, plain)


@pytest.mark.gpu
def test_it_runs_in_a_cuda_graph() -> None:
    inputs = Case(tokens=50, count=40, dim=64, experts=90).inputs(torch.bfloat16)
    floats = [inputs[name].requires_grad_() for name in ("hidden", "experts")]

    def step() -> list[Tensor]:
        logits = chosen_logits(floats[0], floats[1], inputs["ids"], normalize=True)
        return [logits, *torch.autograd.grad(logits, floats, logits.detach())]

    eager, graph, replayed = captured(step)
    graph.replay()
    for found, wanted in zip(replayed, eager, strict=True):
        assert torch.equal(found, wanted)
