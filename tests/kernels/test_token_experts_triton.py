"""Experts over per-token lists in Triton: values and gradients equal the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.token_experts import (
    Activation,
    ExpertTables,
    activate,
    compact_gates,
    is_gated,
    token_experts,
    token_experts_op,
)
from tests.kernels.comparison import DEVICE, Found, assert_as_good, doubles, dtypes

pytest.importorskip("triton")
from airmoe.kernels import rows_triton, token_experts_triton
from airmoe.kernels.token_experts_triton import _weigh, _weigh_grads


@dataclass(frozen=True)
class Case:
    tokens: int
    top_k: int
    dim: int
    experts: int = 5
    expert_size: int = 1
    activation: Activation = "swiglu"
    popular: int = 2  # places of every list that hold expert 1: as PEER's heads, it may repeat

    def inputs(self, dtype: torch.dtype) -> Found:
        rows = (self.experts * self.expert_size, self.dim)
        floats = {
            "hidden": torch.randn(self.tokens, self.dim),
            "gate": torch.randn(rows) * self.dim**-0.5,
            "up": torch.randn(rows) * self.dim**-0.5,
            "down": torch.randn(rows),
            "weights": torch.rand(self.tokens, self.top_k),
        }
        if not is_gated(self.activation):
            del floats["gate"]
        floats["weights"][:, 1:2] = 0  # an unused slot
        ids = torch.randint(self.experts, (self.tokens, self.top_k))
        ids[:, : self.popular] = 1
        return {
            **{name: tensor.to(DEVICE, dtype) for name, tensor in floats.items()},
            "expert_ids": ids.to(DEVICE),
        }

    def run(self, given: Found) -> Found:
        tables = ExpertTables(
            given.get("gate"), given["up"], given["down"], self.activation, self.expert_size
        )
        output = token_experts(given["hidden"], tables, given["weights"], given["expert_ids"])
        return {"output": output}


CASES = {
    "odd": Case(tokens=3, top_k=21, dim=37, popular=8),
    "one expert each": Case(tokens=4, top_k=1, dim=16, popular=0),
    "several neurons": Case(tokens=3, top_k=5, dim=24, expert_size=3),
    # Enough products that the reference cannot be lucky with all of them.
    "several column blocks": Case(tokens=20, top_k=7, dim=110),
    "no tokens": Case(tokens=0, top_k=3, dim=16),
    "empty lists": Case(tokens=2, top_k=0, dim=16, popular=0),
}
TINY = Case(tokens=2, top_k=3, dim=16, experts=3)
named = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(params=["small batch", "large batch"])
def _both_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of either size of batch; long rows in parts, wide ones in several blocks."""
    if request.param == "large batch":
        monkeypatch.setattr(token_experts_triton, "SMALL_BATCH", 0)
    monkeypatch.setattr(rows_triton, "PART_ENTRIES", 16)
    monkeypatch.setattr(rows_triton, "MOST_COLUMNS", 64)
    monkeypatch.setattr(rows_triton, "MOST_COLUMNS_IN_PAIRS", 32)
    monkeypatch.setattr(token_experts_triton, "TILE_ELEMENTS", 256)


@named
@dtypes
@pytest.mark.usefixtures("_both_sizes")
def test_values_and_gradients_equal_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_as_good(case.run, case.inputs(dtype))


@pytest.mark.parametrize("activation", [a for a in get_args(Activation) if a != "swiglu"])
@dtypes
@pytest.mark.usefixtures("_both_sizes")
def test_activations(activation: Activation, dtype: torch.dtype) -> None:
    case = replace(TINY, activation=activation)
    assert_as_good(case.run, case.inputs(dtype))


SIZES = [0.0, 1e-3, 0.5, 2.0, 5.5, 10.05, 10.07, 30.0, 88.0, 88.8, 100.0, 1e4, 1e12, 1e30]


@pytest.mark.parametrize("activation", get_args(Activation))
@dtypes
def test_any_pre_activation_gives_what_the_formula_does(
    activation: Activation, dtype: torch.dtype
) -> None:
    """Values and slopes one by one, up to where the dtype itself ends."""
    sizes = [size for size in SIZES if size < torch.finfo(dtype).max]
    line = torch.tensor([-size for size in sizes] + sizes, device=DEVICE, dtype=dtype)
    up, gate = (axis.contiguous() for axis in torch.meshgrid(line, line, indexing="ij"))
    weights = torch.full_like(up, 0.5)
    gates = gate if is_gated(activation) else up
    own_gate = gate if is_gated(activation) else None
    tables = ExpertTables(own_gate, up, up, activation)
    activations = up, own_gate, weights, tables
    ones = torch.ones_like(up, dtype=torch.float32)
    fast = [_weigh(*activations), *_weigh_grads(ones, *activations)]

    def by_formula(dtype: torch.dtype) -> list[Tensor]:
        inputs = [value.to(dtype).requires_grad_() for value in (up, gate, weights)]
        value = activate(activation, inputs[0], inputs[1] if is_gated(activation) else None)
        value = value * inputs[2]
        return [value, *torch.autograd.grad(value.sum(), inputs, materialize_grads=True)]

    names, limits = ("value", "up", "gate", "weights"), torch.finfo(dtype)
    natural = up.double().abs().clamp_min(1) * gates.double().abs().clamp_min(1)
    for name, found, exact, plain in zip(
        names, fast, by_formula(torch.float64), by_formula(torch.float32), strict=True
    ):
        if found is None:  # the gradient of a gate that is not there
            continue
        inside = exact.abs() < limits.max
        error, plain_error = ((other.double() - exact).abs() for other in (found, plain))
        # The relative error of exp(x) grows with x (but for a fused product, which the interpreter
        # lacks); 1 + tanh(x) is 0 too soon even in float64; its slope is NaN when cubes overflow.
        bound = limits.tiny + limits.eps * exact.abs() * (8 + gates.double().abs().clamp_max(100))
        bound += 2 * plain_error.nan_to_num(0.0) + 1e-15 * natural
        wrong = inside & ~(error <= bound)
        assert not wrong.any(), (name, up[wrong], gate[wrong], (error / exact)[wrong])
        assert (found.double() == exact.to(dtype).double())[~inside].all(), name


@pytest.mark.parametrize("activation", get_args(Activation))
@dtypes
@pytest.mark.usefixtures("_both_sizes")
def test_extreme_experts(activation: Activation, dtype: torch.dtype) -> None:
    """Pre-activations of 100 and +-10,000."""
    case = Case(tokens=6, top_k=8, dim=40, activation=activation, popular=0)
    inputs = case.inputs(dtype)
    inputs["expert_ids"] %= 2  # but for these three
    inputs["expert_ids"][:, 1:4] = torch.tensor([2, 3, 4])
    inputs["weights"][:, 1:4] = 0.1
    inputs["hidden"][:, 0] = 4
    inputs["down"] /= 16  # float16 ends at 65504
    pre = inputs["gate" if is_gated(activation) else "up"]  # the first column: a quarter of it
    pre[2:5, 0] = torch.tensor([25.0, 2.5e3, -2.5e3])
    assert_as_good(case.run, inputs)


@pytest.mark.usefixtures("_both_sizes")
def test_a_weight_of_0_has_its_gradient() -> None:
    """A router of one's own may start there: every expert of a list was chosen."""
    case = Case(tokens=6, top_k=8, dim=40, popular=0)
    inputs = case.inputs(torch.float32)
    inputs["weights"].zero_()
    assert_as_good(case.run, inputs)
    weights = inputs["weights"].requires_grad_()
    (grad,) = torch.autograd.grad(case.run(inputs)["output"].sum(), weights)
    assert (grad != 0).all()


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 100), (7, 37), (64, 3), (65, 3)])
def test_batches_of_decoding(tokens: int, top_k: int) -> None:
    case = Case(tokens=tokens, top_k=top_k, dim=20, experts=150, popular=0)
    inputs = case.inputs(torch.float32)
    with use_backend("reference"):
        wanted, plain = (case.run(given)["output"] for given in (doubles(inputs), inputs))
    with use_backend("triton"):
        found = case.run(inputs)["output"]
    error, allowed = ((value.double() - wanted).abs().max().item() for value in (found, plain))
    floor = 8 * torch.finfo(torch.float32).eps * wanted.abs().max().item()
    assert error <= 2 * allowed + floor


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 33, 64])
def test_a_small_batch_fills_the_device(tokens: int) -> None:
    rows, columns = token_experts_triton.small_tile_shape(tokens, 512, 1024)
    programs = tokens * -(-512 // rows)
    enough = token_experts_triton.ENOUGH_PROGRAMS
    assert programs >= enough or rows == token_experts_triton.FEWEST_ROWS
    assert rows * columns <= token_experts_triton.TILE_ELEMENTS


def test_float32_weights_with_half_experts() -> None:
    case = TINY
    inputs = case.inputs(torch.float16)
    assert_as_good(case.run, inputs | {"weights": inputs["weights"].float()})


@pytest.mark.parametrize(
    ("free", "unwanted"),
    [
        (("hidden", "weights"), "sort_entries"),
        (("gate", "up", "down"), "row_totals"),
        (("down",), "row_dots"),
        (("up",), "row_totals"),
        (("gate", "weights"), "row_totals"),
    ],
)
def test_frozen_operands_cost_nothing(
    free: tuple[str, ...], unwanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small forward uses none of these, so that the one not wanted in the backward can go."""
    monkeypatch.setattr(token_experts_triton, unwanted, None)  # calling it would raise
    assert_as_good(TINY.run, TINY.inputs(torch.float32), free)


def test_nothing_is_kept_without_gradients() -> None:
    inputs = TINY.inputs(torch.float32)
    arguments = (*inputs.values(), "swiglu", 1)
    _, *kept = token_experts_op(*arguments, True)
    _, *not_kept = token_experts_op(*arguments, False)
    assert [tensor.numel() for tensor in not_kept] == [0, 0]
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 3), (2, 3)]


@dtypes
@pytest.mark.parametrize(("pool", "count"), [(19, 5), (16, 16), (70, 9)])
def test_compact_gates_lists_the_chosen_of_tokens_in_order(
    pool: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airmoe.kernels.token_experts_triton.COMPACT_BLOCK", 32)
    gates = torch.zeros(6, pool, dtype=dtype)
    chosen = [count, 0, 1, count, count - 1, count]
    for row, number in enumerate(chosen):
        gates[row, torch.randperm(pool)[:number]] = (torch.rand(number) + 0.1).to(dtype)
    pools = torch.stack([torch.randperm(200)[:pool] for _ in range(4)])
    cells = torch.tensor([3, 0, 0, 2, 1, 3])
    token_ids = torch.tensor([4, 5, 2, 0, 1, 3])
    given = (tensor.to(DEVICE) for tensor in (gates, pools, cells, token_ids))
    expert_ids, weights = compact_gates(*given, count=count)
    assert expert_ids.shape == weights.shape == (6, count)
    assert expert_ids.dtype == torch.int64 and weights.dtype == dtype
    for row, number in enumerate(chosen):
        token = token_ids[row]
        places = gates[row].nonzero().flatten()
        unused = count - number
        assert expert_ids[token].tolist() == pools[cells[row], places].tolist() + [0] * unused
        assert weights[token].tolist() == gates[row, places].tolist() + [0.0] * unused


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=1000, top_k=77, dim=200, experts=999),
        Case(tokens=3000, top_k=512, dim=256, experts=4096, activation="geglu"),
        Case(tokens=129, top_k=33, dim=1030, experts=50, expert_size=3),
        Case(tokens=64, top_k=500, dim=4096, experts=2000),
        Case(tokens=7, top_k=512, dim=1000, experts=2000, activation="gelu"),
        Case(tokens=1, top_k=300, dim=1024, experts=2000),
    ],
    ids=str,
)
def test_large_shapes(case: Case, dtype: torch.dtype) -> None:
    assert_as_good(case.run, case.inputs(dtype))


@pytest.mark.gpu
def test_memory_stays_far_below_the_gathered_rows() -> None:
    case = Case(tokens=8192, top_k=512, dim=256, experts=8192)
    inputs = case.inputs(torch.bfloat16)
    floats = [tensor.requires_grad_() for name, tensor in inputs.items() if name != "expert_ids"]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = case.run(inputs)["output"]
    torch.autograd.grad(output, floats, output.detach())
    gathered = case.tokens * case.top_k * case.dim * 2
    assert torch.cuda.max_memory_allocated() - before < gathered / 4
