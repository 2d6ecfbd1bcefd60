"""The softmax over all experts on Triton: values and gradients equal the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import Backend, use_backend
from airmoe.kernels.noise import Noise
from airmoe.kernels.softmax_summary import softmax_summary
from tests.kernels.comparison import (
    DEVICE,
    Found,
    any_noise,
    assert_as_good,
    assert_no_worse,
    doubles,
    logits_of,
    results_and_grads,
)

pytest.importorskip("triton")
from airmoe.kernels import best_experts_triton as tables
from airmoe.kernels.softmax_summary_triton import Chunks

SUMMARY = "airmoe.kernels.softmax_summary_triton"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def summarize(
    given: Iterable[Tensor], weights: Tensor, noise: Noise | None = None, *, normalize: bool = True
) -> list[Tensor]:
    """log Z and means of (hidden, experts)."""
    hidden, experts = given
    found = softmax_summary(hidden, experts, weights, noise, normalize=normalize)
    return [found.log_z, found.mean_probs]


@dataclass(frozen=True)
class Case:
    tokens: int
    experts: int
    dim: int
    noise: float = 0.0
    normalize: bool = True
    size: float = 1.0  # of the logits, about

    def inputs(self, hidden_dtype: torch.dtype = F32, experts_dtype: torch.dtype = F32) -> Found:
        hidden = torch.randn(self.tokens, self.dim) * self.size
        experts = torch.randn(self.experts, self.dim) / self.dim**0.5
        if self.normalize:  # norms of 1/2, 1 and 2, about; one is 0
            experts *= 2.0 ** torch.randint(-1, 2, (self.experts, 1))
            experts[self.experts // 2] = 0
        found = {"hidden": hidden.to(hidden_dtype), "experts": experts.to(experts_dtype)}
        return {name: tensor.to(DEVICE) for name, tensor in found.items()}

    def weights(self) -> Tensor:
        """Unequal, about a third of them 0; they sum to 1."""
        weights = torch.rand(self.tokens) * (torch.rand(self.tokens) > 0.3)
        return (weights / weights.sum().clamp_min(1e-3)).to(DEVICE)

    def jitter(self) -> Noise | None:
        return any_noise(self.tokens, self.noise) if self.noise else None

    def function(self) -> Callable[[Found], Found]:
        weights, noise = self.weights(), self.jitter()

        def summary(given: Found) -> Found:
            both = given["hidden"], given["experts"]
            log_z, mean = summarize(both, weights, noise, normalize=self.normalize)
            return {"log_z": log_z, "mean": mean}

        return summary


CASES = {
    "odd": Case(tokens=21, experts=150, dim=33, noise=0.05),
    "plain": Case(tokens=20, experts=64, dim=16, normalize=False),
    "one expert": Case(tokens=3, experts=1, dim=16, normalize=False),
    "one token": Case(tokens=1, experts=130, dim=20, noise=0.1),
    "several depths": Case(tokens=9, experts=70, dim=200, noise=0.01, normalize=False),
    "sharp": Case(tokens=40, experts=140, dim=24, noise=0.05, size=30),
    "no tokens": Case(tokens=0, experts=3, dim=16),
}
SMALL = Case(tokens=13, experts=70, dim=20, noise=0.05)
named = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
DTYPE_PAIRS = [(F32, F32), (F16, F32), (BF16, F32), (F16, F16), (F32, BF16), (BF16, BF16)]


@pytest.fixture
def _in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 tokens of 256 padded columns, each in splits, as large batches have them."""
    monkeypatch.setattr(f"{SUMMARY}.CHUNK_ELEMENTS", 16 * 256)


@named
def test_values_and_gradients_equal_the_reference(case: Case) -> None:
    assert_as_good(case.function(), case.inputs())


@pytest.mark.usefixtures("_in_chunks")
@pytest.mark.parametrize("case", [CASES["odd"], CASES["sharp"]], ids=["odd", "sharp"])
def test_chunks(case: Case) -> None:
    inputs = case.inputs()
    chunks = Chunks(inputs["hidden"], inputs["experts"], (None, 0.0), normalize=False)
    assert len(list(chunks.slices())) > 1
    assert_as_good(case.function(), inputs)


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize(("hidden_dtype", "experts_dtype"), DTYPE_PAIRS, ids=str)
def test_operands_of_several_dtypes(
    hidden_dtype: torch.dtype,
    experts_dtype: torch.dtype,
    in_registers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables of many tokens are cut into parts once; those of few, or too large ones, where they
    are multiplied."""
    if not in_registers:
        monkeypatch.setattr(tables, "SPLIT_TOKENS", 1)
    case = Case(tokens=13, experts=100, dim=40, noise=0.05)
    assert_as_good(case.function(), case.inputs(hidden_dtype, experts_dtype))


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "plain"])
def test_values_and_gradients_are_those_of_the_formula(backend: Backend, normalize: bool) -> None:
    """And of no formula without the jitter, the weights or the norms: those differ by far more."""
    case = Case(tokens=19, experts=40, dim=24, noise=0.2)
    inputs, weights, noise = case.inputs(), case.weights(), case.jitter()
    inputs["experts"] = inputs["experts"][:19]  # without the zero row, where the norm has a corner
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    logits = logits_of(**doubles(leaves), noise=noise, normalize=normalize)
    wanted = [logits.logsumexp(-1), (logits.softmax(-1) * weights.unsqueeze(-1)).sum(0)]
    with use_backend(backend):
        results = summarize(leaves.values(), weights, noise, normalize=normalize)
        upstream = [torch.randn_like(value) for value in results]
        grads = torch.autograd.grad(results, list(leaves.values()), upstream)
    exact = torch.autograd.grad(wanted, list(leaves.values()), [each.double() for each in upstream])
    for value, right in zip((*results, *grads), (*wanted, *exact), strict=True):
        assert value.dtype == torch.float32
        assert (value - right).abs().max() <= 1e-5 * max(1, right.abs().max())


def test_logits_whose_exponentials_overflow() -> None:
    """A logit z is off by eps |z|, and its probability by as much of itself."""
    case = Case(tokens=17, experts=100, dim=24, size=200)
    inputs, summary = case.inputs(), case.function()
    assert logits_of(**inputs, noise=None, normalize=True).max() > 300
    with use_backend("reference"):
        exact = results_and_grads(summary, doubles(inputs))
    with use_backend("triton"):
        fast = results_and_grads(summary, inputs)
    for name, wanted in exact.items():
        assert (fast[name] - wanted).abs().max() <= 1e-3 * wanted.abs().max(), name


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_token_that_does_not_count_may_hold_anything(backend: Backend, value: float) -> None:
    case = Case(tokens=20, experts=30, dim=16, noise=0.1)
    inputs, noise = case.inputs(), case.jitter()
    weights = torch.full((20,), 1 / 18, device=DEVICE)
    weights[[4, 19]] = 0
    counted = weights > 0

    def results() -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs.values()]
        with use_backend(backend):
            log_z, mean = summarize(leaves, weights, noise)
            loss = log_z[counted].square().sum() + mean.square().sum()
            grad_hidden, grad_experts = torch.autograd.grad(loss, leaves)
        assert (grad_hidden[~counted] == 0).all()
        return [log_z[counted], mean, grad_hidden, grad_experts]

    wanted = results()
    inputs["hidden"][4, 3], inputs["hidden"][19] = value, value
    for found, right in zip(results(), wanted, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_nan_that_counts_shows(backend: Backend) -> None:
    case = Case(tokens=5, experts=300, dim=16)
    inputs = case.inputs()
    weights = torch.full((5,), 0.2, device=DEVICE)
    inputs["experts"][290, 1] = torch.nan
    with use_backend(backend):
        found = summarize(inputs.values(), weights)
    assert all(result.isnan().all() for result in found)


def test_equal_gradients_of_all_means_move_nothing() -> None:
    """The probabilities of a token add up to 1, so a constant must drop out."""
    case = Case(tokens=16, experts=100, dim=24)
    inputs = [tensor.requires_grad_() for tensor in case.inputs().values()]
    with use_backend("triton"):
        _log_z, mean = summarize(inputs, case.weights())
        grads = torch.autograd.grad(1000 * mean.sum(), inputs)
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("name", ["log_z", "mean"])
def test_a_loss_of_one_of_the_results(name: str) -> None:
    summary = SMALL.function()
    assert_as_good(lambda given: {name: summary(given)[name]}, SMALL.inputs())


@pytest.mark.parametrize(
    ("free", "unwanted"), [("hidden", "expert_grads"), ("experts", "hidden_grads")]
)
def test_frozen_operands_cost_nothing(
    free: str, unwanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chunks, unwanted, None)  # calling it would raise
    assert_as_good(SMALL.function(), SMALL.inputs(), (free,))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden_dtype", "experts_dtype"), [(BF16, F32), (F32, F32), (BF16, BF16), (F16, F16)], ids=str
)
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=4096, experts=65_536, dim=256, noise=0.01),
        Case(tokens=4096, experts=65_536, dim=256, noise=0.01, size=4),
        Case(tokens=3000, experts=20_001, dim=768, noise=0.01),
        Case(tokens=777, experts=5000, dim=100, noise=0.01),
        Case(tokens=20_000, experts=8, dim=64),
        Case(tokens=65, experts=300_000, dim=64, noise=0.01),
    ],
    ids=str,
)
def test_large_shapes(case: Case, hidden_dtype: torch.dtype, experts_dtype: torch.dtype) -> None:
    """Against the reference in float64, with memory for some scores and three tables at most."""
    given, summary = case.inputs(hidden_dtype, experts_dtype), case.function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fast = results_and_grads(summary, given)
    assert torch.cuda.max_memory_allocated() - before <= 1 << 30
    with use_backend("reference"):
        exact, plain = (
            results_and_grads(summary, {name: value.to(dtype) for name, value in given.items()})
            for dtype in (torch.float64, F32)
        )
    for name, value in fast.items():
        plain[name] = plain[name].to(value.dtype)
    assert_no_worse(fast, plain, exact)
