"""RMS norm with the addition before it, on Triton: Llama's numbers, and one pass backwards."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from airmoe.kernels.backend import Backend, use_backend
from airmoe.kernels.rms_norm import add_rms_norm
from tests.kernels.comparison import (
    DEVICE,
    DTYPES,
    Found,
    assert_no_worse,
    doubles,
    dtypes,
    results_and_grads,
)

pytest.importorskip("triton")
EPS = 1e-5


def formula(given: Found) -> Found:
    summed = given["hidden"] + given.get("delta", 0)
    mean = summed.square().mean(-1, keepdim=True)
    return {"summed": summed, "normed": given["weight"] * summed / (mean + EPS).sqrt()}


def check(given: Found, dtype: torch.dtype | None = None) -> None:
    def run(leaves: Found) -> Found:
        found = add_rms_norm(leaves["hidden"], leaves.get("delta"), leaves["weight"], EPS, dtype)
        return dict(zip(("summed", "normed"), found, strict=True))

    exact = results_and_grads(formula, doubles(given))
    with use_backend("reference"):
        plain = results_and_grads(run, given)
    with use_backend("triton"):
        fast = results_and_grads(run, given)
    assert_no_worse(fast, plain, exact)


def operands(shape: tuple[int, ...], hidden: torch.dtype, delta: torch.dtype | None) -> Found:
    dim = shape[-1]
    given = {
        "hidden": (3 * torch.randn(shape, device=DEVICE)).to(hidden),
        "weight": (1 + 0.3 * torch.randn(dim, device=DEVICE)).to(hidden),
    }
    if delta is not None:
        given["delta"] = torch.randn(shape, device=DEVICE).to(delta)
    return given


@dtypes
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 16), (70, 24), (33, 256), (5, 1500), (4, 4096)])
def test_values_and_gradients(shape: tuple[int, ...], adds: bool, dtype: torch.dtype) -> None:
    check(operands(shape, dtype, dtype if adds else None))


@pytest.mark.parametrize("delta", [None, *DTYPES])
def test_as_under_autocast(delta: torch.dtype | None) -> None:
    """The stream is float32; what is added to it and what products read have 16 bits."""
    check(operands((3, 50, 48), torch.float32, delta), DTYPES[-1])


@pytest.mark.parametrize("backend", ["reference", "triton"])
@dtypes
def test_it_is_llamas(dtype: torch.dtype, backend: Backend) -> None:
    norm = LlamaRMSNorm(24, EPS).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    given = operands((9, 24), dtype, dtype)
    with use_backend(backend):
        summed, normed = add_rms_norm(given["hidden"], given["delta"], norm.weight, EPS, None)
    assert torch.equal(summed, given["hidden"] + given["delta"])
    rounded = 3 * torch.finfo(dtype).eps  # of the same number, a step further at a tie
    torch.testing.assert_close(normed, norm(summed), rtol=rounded, atol=0)
    if backend == "reference":
        assert torch.equal(normed, norm(summed))


@pytest.mark.parametrize("used", ["summed", "normed"])
@pytest.mark.parametrize("adds", [False, True])
def test_one_of_both_is_not_used(used: str, adds: bool) -> None:
    given = operands((6, 16), torch.float32, torch.float16 if adds else None)
    if used == "summed":
        del given["weight"]
    weight = given.get("weight", torch.ones(16, device=DEVICE))

    def run(leaves: Found) -> Found:
        found = add_rms_norm(leaves["hidden"], leaves.get("delta"), weight_of(leaves), EPS, None)
        return {used: found[used == "normed"]}

    def weight_of(leaves: Found) -> torch.Tensor:
        return leaves.get("weight", weight)

    with use_backend("reference"):
        wanted = results_and_grads(run, given)
    with use_backend("triton"):
        found = results_and_grads(run, given)
    torch.testing.assert_close(found, wanted)


def test_frozen_operands_get_no_gradient() -> None:
    given = operands((6, 16), torch.float32, torch.float32)
    for free in given:
        leaves = {name: value.clone().requires_grad_(name == free) for name, value in given.items()}
        with use_backend("triton"):
            found = add_rms_norm(leaves["hidden"], leaves["delta"], leaves["weight"], EPS, None)
        (found[0].sum() + found[1].pow(3).sum()).backward()
        for name, leaf in leaves.items():
            assert (leaf.grad is not None) == (name == free)


@pytest.mark.parametrize("adds", [False, True])
def test_compiled_steps_equal_eager_ones(adds: bool) -> None:
    """Without a break in the graph, although the stream may be returned as it is."""
    given = operands((5, 16), torch.float32, torch.float16 if adds else None)

    def run(leaves: Found) -> Found:
        hidden, normed = add_rms_norm(
            2 * leaves["hidden"], leaves.get("delta"), leaves["weight"], EPS, torch.float16
        )
        again = add_rms_norm(hidden, normed, leaves["weight"], EPS, None)
        return {"hidden": hidden + normed, "normed": again[1]}

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with use_backend("triton"):
        wanted, found = results_and_grads(run, given), results_and_grads(compiled, given)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
