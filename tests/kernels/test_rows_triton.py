"""Products over lists of rows in Triton: values and gradients equal the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.rows import gather_dot, gather_total, scatter_total
from tests.kernels.comparison import DEVICE, DTYPES, Found, assert_as_good, captured

pytest.importorskip("triton")
from airmoe.kernels import rows_triton
from airmoe.kernels.rows_triton import gather_dot_op, gather_total_op, scatter_total_op


@dataclass(frozen=True)
class Case:
    queries: int
    list_size: int
    dim: int
    rows: int
    popular: int = 0  # places of every list that hold row 1

    def inputs(self, dtype: torch.dtype) -> Found:
        ids = torch.randint(self.rows, (self.queries, self.list_size))
        ids[:, : self.popular] = 1
        shapes = {
            "queries": (self.queries, self.dim),
            "table": (self.rows, self.dim),
            "weights": (self.queries, self.list_size),
        }
        floats = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
        return {name: tensor.to(DEVICE) for name, tensor in (floats | {"ids": ids}).items()}


CASES = {
    "odd": Case(queries=5, list_size=21, dim=37, rows=9),
    "one id each": Case(queries=6, list_size=1, dim=16, rows=4),
    "unused rows": Case(queries=2, list_size=3, dim=20, rows=15),
    "several column blocks": Case(queries=3, list_size=18, dim=300, rows=7),
    "popular": Case(queries=9, list_size=12, dim=24, rows=6, popular=7),
    "all the same": Case(queries=9, list_size=8, dim=24, rows=3, popular=8),
    "no queries": Case(queries=0, list_size=4, dim=16, rows=3),
    "empty lists": Case(queries=3, list_size=0, dim=16, rows=3),
}
named = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 16 entries are summed in parts, as those of a large batch are."""
    monkeypatch.setattr(rows_triton, "PART_ENTRIES", 16)


def all_products(given: Found) -> Found:
    queries, table, weights, ids = (given[k] for k in ("queries", "table", "weights", "ids"))
    return {
        "dot": gather_dot(queries, table, ids),
        "total": gather_total(weights, table, ids),
        "scatter": scatter_total(weights, queries, ids, table.shape[0]),
    }


@named
@dtypes
@pytest.mark.usefixtures("_short_parts")
def test_values_and_gradients_equal_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_as_good(all_products, case.inputs(dtype))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    "case",
    [
        Case(queries=1000, list_size=77, dim=200, rows=999, popular=9),
        Case(queries=4000, list_size=512, dim=256, rows=4096, popular=1),
        Case(queries=129, list_size=33, dim=1030, rows=50),
        Case(queries=3, list_size=5000, dim=64, rows=100_000),
    ],
    ids=str,
)
def test_large_shapes(case: Case, dtype: torch.dtype) -> None:
    assert_as_good(all_products, case.inputs(dtype))


def test_operands_of_several_dtypes() -> None:
    """Weights of a router are float32 whatever the model is; the result is in the table's dtype."""
    inputs = CASES["odd"].inputs(torch.float16)
    inputs["weights"] = inputs["weights"].float()

    def total(given: Found) -> Found:
        return {"total": gather_total(given["weights"], given["table"], given["ids"])}

    del inputs["queries"]
    assert_as_good(total, inputs)


def test_strided_operands_and_short_ids() -> None:
    inputs = CASES["odd"].inputs(torch.float32)
    with use_backend("triton"):
        wanted = all_products(inputs)
        strided = {k: v.T.contiguous().T if v.ndim == 2 else v for k, v in inputs.items()}
        found = all_products(strided | {"ids": strided["ids"].int()})
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.usefixtures("_short_parts")
def test_sums_are_the_same_every_time() -> None:
    inputs = CASES["popular"].inputs(torch.float32)
    arguments = (inputs["weights"], inputs["queries"], inputs["ids"], 6)
    with use_backend("triton"):
        assert torch.equal(scatter_total(*arguments), scatter_total(*arguments))


@pytest.mark.parametrize("frozen", ["queries", "table"])
def test_frozen_operands_cost_nothing(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CASES["odd"].inputs(torch.float32)
    free = "queries" if frozen == "table" else "table"
    unwanted = "row_sums" if frozen == "table" else "row_totals"
    monkeypatch.setattr(rows_triton, unwanted, None)  # calling it would raise

    def dot(given: Found) -> Found:
        both = given | {frozen: inputs[frozen].to(given[free].dtype)}
        return {"dot": gather_dot(both["queries"], both["table"], inputs["ids"])}

    assert_as_good(dot, {free: inputs[free]})


@pytest.mark.parametrize("sizes", [[0, 17, 16, 33, 0, 1], [200], [0], [17] * 9, [16] * 4, [15, 50]])
@pytest.mark.usefixtures("_short_parts")
def test_parts_cover_the_entries_of_popular_rows(sizes: list[int]) -> None:
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    shuffled = ids[torch.randperm(ids.numel())].unsqueeze(-1).to(DEVICE)
    entries = rows_triton.sort_entries(shuffled, len(sizes))
    wanted = [row for row, size in enumerate(sizes) if size > 16 for _ in range(-(-size // 16))]
    part_ids = entries.part_ids.tolist()
    assert part_ids[: len(wanted)] == wanted
    assert all(row == len(sizes) for row in part_ids[len(wanted) :])
    assert shuffled.flatten()[entries.order].tolist() == ids.tolist()
    assert entries.starts.diff().tolist() == sizes


def scatter_to_table(weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    return scatter_total_op(weights, rows, ids, 9)


OPERATORS = {
    "gather_dot": (gather_dot_op, ("queries", "table", "ids")),
    "gather_total": (gather_total_op, ("weights", "table", "ids")),
    "scatter_total": (scatter_to_table, ("weights", "queries", "ids")),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compile_without_a_break(name: str) -> None:
    function, names = OPERATORS[name]
    inputs = CASES["odd"].inputs(torch.float32)
    arguments = [inputs[name].requires_grad_(name != "ids") for name in names]

    def run(function: Callable[..., Tensor]) -> tuple[Any, ...]:
        value = function(*arguments)
        return value, *torch.autograd.grad(value.sin().sum(), arguments[:2])

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for plain, found in zip(run(function), run(compiled), strict=True):
        assert torch.equal(found, plain)


@pytest.mark.gpu
def test_products_run_in_a_cuda_graph() -> None:
    inputs = Case(queries=50, list_size=40, dim=64, rows=90).inputs(torch.bfloat16)
    floats = [tensor.requires_grad_() for name, tensor in inputs.items() if name != "ids"]

    def step() -> list[Tensor]:
        results = list(all_products(inputs).values())
        return [*results, *torch.autograd.grad(results, floats, [r.detach() for r in results])]

    eager, graph, replayed = captured(step)
    graph.replay()
    for found, wanted in zip(replayed, eager, strict=True):
        assert torch.equal(found, wanted)
