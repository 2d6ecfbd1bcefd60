"""The batched kernels (GPUs use them) equal the references, values and every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from airmoe.kernels import cell_experts, cell_scores
from airmoe.kernels.cell_experts import Activation, is_gated
from airmoe.kernels.cell_experts.reference import Form
from airmoe.kernels.cells.groups import GROUP_BYTES, make_groups, plan_groups
from airmoe.kernels.noise import Stage, make_noise
from tests.tolerance import allowed_error, assert_close

DIM, EXPERTS, POOL = 6, 40, 10
TINY_BUDGET = 600  # bytes: two cells of float32 at most, and long cells in parts
SIZES = {
    "random": [3, 0, 7, 1, 12, 5, 0, 2, 6, 6],
    "one huge": [2, 150, 1, 0, 3],
    "all in one": [0, 0, 37, 0],
    "single rows": [1] * 9,
    "one row": [0, 1],
    "no rows": [0, 0, 0],
}
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]  # rows of each cell
    dtype: torch.dtype = torch.float32
    activation: Activation = "swiglu"
    expert_size: int = 1
    jitter: bool = True
    normalize: bool = True
    frozen: tuple[str, ...] = ()
    budget: int = GROUP_BYTES
    spoiled: bool = False  # the last token is not finite

    @property
    def num_tokens(self) -> int:
        return max(1, sum(self.sizes) // 2)  # about two rows per token, as with two probes

    def hidden(self) -> Tensor:
        hidden = torch.randn(self.num_tokens, DIM).to(self.dtype)
        if self.spoiled:
            hidden[-1] = torch.nan
        return hidden

    def layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """token_ids [N], offsets [G + 1], pools [G, M]; cells share experts and tokens."""
        offsets = torch.tensor([0, *self.sizes]).cumsum(0)
        token_ids = torch.randperm(int(offsets[-1])) % self.num_tokens
        pools = torch.rand(len(self.sizes), EXPERTS).argsort(-1)[:, :POOL].sort(-1).values
        return token_ids, offsets, pools


def leaves(case: Case, inputs: Found, dtype: torch.dtype) -> Found:
    return {
        key: value.to(dtype).requires_grad_(key not in case.frozen) for key, value in inputs.items()
    }


def outcome(result: Tensor, operands: Found, upstream: Tensor) -> Found:
    """The result and the gradient of everything that is not frozen."""
    names = [key for key, value in operands.items() if value.requires_grad]
    grads = torch.autograd.grad(result, [operands[k] for k in names], upstream.to(result.dtype))
    assert all(operands[key].dtype == grad.dtype for key, grad in zip(names, grads, strict=True))
    return {"result": result.detach(), **dict(zip(names, grads, strict=True))}


def scores_runner(case: Case) -> Callable[[ModuleType, torch.dtype], Found]:
    layout = case.layout()
    inputs = {
        "hidden": case.hidden(),
        "centroids": torch.randn(EXPERTS, DIM).to(case.dtype),
    }
    norms = 1 / inputs["centroids"].float().norm(dim=-1) if case.normalize else None
    key = torch.tensor(12345)
    noise = make_noise(key, Stage.TOKEN, case.num_tokens, 0.5) if case.jitter else None
    upstream = torch.randn(sum(case.sizes), POOL)

    def run(module: ModuleType, dtype: torch.dtype) -> Found:
        operands = leaves(case, inputs, dtype)
        result = module.CellScores.apply(*operands.values(), norms, *layout, noise)
        assert result.dtype == torch.promote_types(dtype, torch.float32)
        return outcome(result, operands, upstream)

    return run


def experts_runner(case: Case) -> Callable[[ModuleType, torch.dtype], Found]:
    layout = case.layout()
    neurons = EXPERTS * case.expert_size
    inputs = {"hidden": case.hidden()}
    for name in ("gate", "up", "down"):
        if name != "gate" or is_gated(case.activation):
            inputs[name] = torch.randn(neurons, DIM).to(case.dtype)
    gates = torch.rand(sum(case.sizes), POOL)
    inputs["gates"] = gates * (gates > 0.4)  # 0 marks what was not chosen
    upstream = torch.randn(case.num_tokens, DIM).to(case.dtype)

    def run(module: ModuleType, dtype: torch.dtype) -> Found:
        operands = leaves(case, inputs, dtype)
        # Gates are float32 beside lower precision.
        wide = torch.promote_types(dtype, torch.float32)
        operands["gates"] = (
            inputs["gates"].to(wide, copy=True).requires_grad_("gates" not in case.frozen)
        )
        form = Form(case.activation, case.expert_size, dtype, True)
        hidden, *tables, gates = operands.values()
        gate = tables.pop(0) if is_gated(case.activation) else None
        result = module.CellExperts.apply(hidden, gate, *tables, gates, *layout, form)
        assert result.dtype == dtype
        return outcome(result, operands, upstream)

    return run


RUNNERS = {"scores": (scores_runner, cell_scores), "experts": (experts_runner, cell_experts)}


def compare(kernel: str, case: Case) -> None:
    """tests/tolerance.py's rule, with the reference in the same dtype as the plain formula.

    In bfloat16 the floor is one rounding of the largest entry: the products of a cell in two parts
    are rounded before they are added.
    """
    make_runner, package = RUNNERS[kernel]
    run: Any = make_runner(case)
    exact, plain = (run(package.reference, t) for t in (torch.float64, case.dtype))
    with pytest.MonkeyPatch.context() as patch:
        limited = functools.partial(make_groups, budget=case.budget)
        patch.setattr(package.batched, "make_groups", limited)
        fast = run(package.batched, case.dtype)
    assert fast.keys() == exact.keys()
    assert fast["result"]._base is None  # a view could not be changed in place
    for key, value in fast.items():
        assert value.dtype == plain[key].dtype
        what, exact64 = f"{kernel} {key} of {case}", exact[key].double()
        if case.dtype == torch.bfloat16 and value.numel():
            error = (value.double() - exact64).abs().max().item()
            rounding = torch.finfo(case.dtype).eps * exact64.abs().max().item()
            assert error <= allowed_error(exact64, plain[key]) + rounding, what
        else:
            assert_close(value, exact64, plain[key], what)
        if case.dtype == torch.float64:
            torch.testing.assert_close(value, plain[key], rtol=1e-12, atol=1e-12)


kernels = pytest.mark.parametrize("kernel", RUNNERS)


@kernels
@pytest.mark.parametrize("budget", [GROUP_BYTES, TINY_BUDGET, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_values_and_gradients(kernel: str, name: str, dtype: torch.dtype, budget: int) -> None:
    compare(kernel, Case(tuple(SIZES[name]), dtype, budget=budget))


@kernels
@given(
    case=st.builds(
        Case,
        sizes=st.lists(st.integers(0, 9) | st.integers(0, 40), min_size=1, max_size=12).map(tuple),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        activation=st.sampled_from(["swiglu", "geglu", "gelu", "relu", "silu"]),
        expert_size=st.sampled_from([1, 3]),
        jitter=st.booleans(),
        normalize=st.booleans(),
        budget=st.sampled_from([1, TINY_BUDGET, 5000, GROUP_BYTES]),
    )
)
@settings(max_examples=60)
def test_values_and_gradients_of_any_layout(kernel: str, case: Case) -> None:
    compare(kernel, case)


@kernels
@pytest.mark.parametrize("name", ["hidden", "centroids", "gate", "up", "down", "gates"])
def test_frozen_operands(kernel: str, name: str) -> None:
    compare(kernel, Case(tuple(SIZES["random"]), frozen=(name,)))
    weights = {"centroids", "gate", "up", "down"}
    compare(kernel, Case(tuple(SIZES["random"]), frozen=tuple(weights - {name})))


@kernels
def test_frozen_weights_get_no_buffer(kernel: str) -> None:
    make_runner, package = RUNNERS[kernel]
    frozen = Case((3, 4), frozen=("centroids", "gate", "up", "down"))
    made: list[torch.Size] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend([result.shape] if "zeros" in str(func) else [])
            return result

    for case in (frozen, replace(frozen, frozen=())):
        run: Any = make_runner(case)
        made.clear()
        with Watch():
            run(package.batched, torch.float32)
        assert ((EXPERTS, DIM) in made) is (case is not frozen)


@kernels
def test_a_token_that_is_not_finite_spoils_what_the_reference_spoils(kernel: str) -> None:
    """Padding takes no number from any token: it could carry a NaN into another cell."""
    make_runner, package = RUNNERS[kernel]
    run: Any = make_runner(Case((4, 7, 5, 4), spoiled=True))
    plain, fast = (run(m, torch.float32) for m in (package.reference, package.batched))
    assert not plain["result"].isfinite().all()
    for key, value in plain.items():
        assert torch.equal(fast[key].isfinite(), value.isfinite()), key


def test_jitter_is_the_same_to_the_bit() -> None:
    """Without products (hidden is 0) the scores are the jitter."""
    case = Case(tuple(SIZES["random"]))
    layout, noise = case.layout(), make_noise(torch.tensor(7), Stage.TOKEN, case.num_tokens, 0.01)
    operands = torch.zeros(case.num_tokens, DIM), torch.randn(EXPERTS, DIM), None
    plain, fast = (
        module.CellScores.apply(*operands, *layout, noise)
        for module in (cell_scores.reference, cell_scores.batched)
    )
    assert torch.equal(plain, fast) and bool((fast != 0).any())


def test_double_backward_is_refused() -> None:
    case = Case((3, 4))
    hidden = torch.randn(case.num_tokens, DIM, requires_grad=True)
    scores = cell_scores.batched.CellScores.apply(
        hidden, torch.randn(EXPERTS, DIM), None, *case.layout(), None
    )
    (grad,) = torch.autograd.grad(scores.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("package", [cell_scores, cell_experts])
def test_gpus_take_groups(package: Any) -> None:
    assert package.implementation("cpu") == "reference"
    assert package.implementation("cuda") == "batched"
    assert package.implementation("xpu") == "batched"


@given(
    sizes=st.lists(st.integers(0, 5) | st.integers(0, 300), min_size=1, max_size=40),
    table_bytes=st.integers(1, 1000),
    row_bytes=st.integers(1, 100),
    budget=st.integers(1, 5000),
)
def test_groups_hold_every_row_once(
    sizes: list[int], table_bytes: int, row_bytes: int, budget: int
) -> None:
    case = Case(tuple(sizes))
    token_ids, offsets, _ = case.layout()
    groups = make_groups(
        token_ids,
        offsets,
        case.num_tokens,
        table_bytes=table_bytes,
        row_bytes=row_bytes,
        budget=budget,
    )
    num_rows, found = len(token_ids), []
    for group in groups:
        count, length = group.rows.shape
        assert group.cells.shape == (count,) and group.tokens.shape == (count, length)
        valid = group.rows < num_rows
        assert (group.rows[~valid] == num_rows).all()
        assert (group.tokens[~valid] == case.num_tokens).all()
        assert torch.equal(group.tokens[valid], token_ids[group.rows[valid]])
        assert (2 * valid.sum(-1) >= length).all(), "more than half is padding"
        cell_of = torch.searchsorted(offsets, group.rows, right=True) - 1
        assert (cell_of == group.cells.unsqueeze(-1))[valid].all()
        assert count == 1 or count * table_bytes <= budget
        assert count * length == 1 or count * length * row_bytes <= budget
        found += group.rows[valid].tolist()
    assert sorted(found) == list(range(num_rows))


def test_a_usual_batch_makes_few_groups() -> None:
    """The paper's small model: 16,384 tokens over 1,024 cells, tables of 2,048 x 256."""
    sizes = torch.bincount(torch.randint(1024, (16_384,)), minlength=1024)
    bounds = [0, *sizes.cumsum(0).tolist()]
    for itemsize, most in ((4, 12), (2, 8)):
        table_bytes, row_bytes = 2048 * 256 * itemsize, 2048 * itemsize
        assert len(plan_groups(bounds, table_bytes, row_bytes, GROUP_BYTES)) <= most


class Launches(TorchDispatchMode):
    """Counts operations that would start something on a GPU: not views, not bare allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        free = ("empty", "new_empty", "resize_", "_unsafe_view", "detach", "view", "_reshape_alias")
        if not func.is_view and not name.partition(".")[0].startswith(free):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches_per_group(kernel: str, case: Case) -> float:
    make_runner, package = RUNNERS[kernel]
    run: Any = make_runner(case)
    totals = []
    for budget in (GROUP_BYTES, 1):
        with pytest.MonkeyPatch.context() as patch, Launches() as launches:
            limited = functools.partial(make_groups, budget=budget)
            patch.setattr(package.batched, "make_groups", limited)
            run(package.batched, case.dtype)
        totals.append(len(launches.names))
    return (totals[1] - totals[0]) / (len(case.sizes) - 1)


def test_a_group_takes_few_launches() -> None:
    """Forward and backward of both kernels under bfloat16; jitter is some 40 by itself."""
    case = Case((1,) * 12, torch.bfloat16, jitter=False)
    scores, experts = (launches_per_group(kernel, case) for kernel in ("scores", "experts"))
    assert scores <= 22 and experts <= 52 and scores + experts <= 70
    assert launches_per_group("scores", replace(case, jitter=True)) - scores <= 45
