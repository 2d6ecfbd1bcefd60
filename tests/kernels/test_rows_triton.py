"""Products over lists of rows, and logits of chosen experts, equal the reference in Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from airmoe.kernels.backend import use_backend
from airmoe.kernels.rows import chosen_logits, gather_dot, gather_total, scatter_total
from tests.kernels.comparison import DEVICE, DTYPES, Found, assert_as_good, dtypes

pytest.importorskip("triton")
from airmoe.kernels import rows_triton


@dataclass(frozen=True)
class Case:
    queries: int
    list_size: int
    dim: int
    rows: int
    popular: int = 0  # places of every list that hold row 1
    aligned: float = 0.0  # how much of every query and row is one common direction

    def inputs(self, dtype: torch.dtype, table_dtype: torch.dtype | None = None) -> Found:
        ids = torch.randint(self.rows, (self.queries, self.list_size))
        ids[:, : self.popular] = 1
        common = self.aligned * torch.randn(self.dim)
        table = common + torch.randn(self.rows, self.dim)
        table[-1] = 0
        found = {
            "queries": (common + torch.randn(self.queries, self.dim)).to(dtype),
            "table": table.to(table_dtype or dtype),
            "weights": torch.randn(self.queries, self.list_size).to(dtype),
            "ids": ids,
        }
        return {name: tensor.to(DEVICE) for name, tensor in found.items()}


CASES = {
    "odd": Case(queries=5, list_size=21, dim=37, rows=9),
    "one id each": Case(queries=6, list_size=1, dim=16, rows=4),
    "unused rows": Case(queries=2, list_size=3, dim=20, rows=15),
    "several column blocks": Case(queries=3, list_size=18, dim=300, rows=7),
    "as many entries as a part holds": Case(queries=2, list_size=8, dim=20, rows=3, popular=8),
    "one entry more": Case(queries=17, list_size=1, dim=20, rows=3, popular=1),
    "two full parts": Case(queries=4, list_size=8, dim=20, rows=3, popular=8),
    "popular": Case(queries=9, list_size=12, dim=24, rows=6, popular=7),
    "all the same": Case(queries=9, list_size=8, dim=24, rows=3, popular=8),
    "aligned": Case(queries=30, list_size=4, dim=33, rows=6, aligned=30),
    "popular and aligned": Case(queries=9, list_size=8, dim=24, rows=3, popular=6, aligned=30),
    "no queries": Case(queries=0, list_size=4, dim=16, rows=3),
    "empty lists": Case(queries=3, list_size=0, dim=16, rows=3),
}


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


def dots(given: Found) -> Found:
    return {"dot": gather_dot(given["queries"], given["table"], given["ids"])}


def logits(given: Found) -> Found:
    return {
        "logits": chosen_logits(given["queries"], given["table"], given["ids"], normalize=False)
    }


def unit_logits(given: Found) -> Found:
    return {"logits": chosen_logits(given["queries"], given["table"], given["ids"], normalize=True)}


FUNCTIONS = {"products": all_products, "logits": logits, "unit logits": unit_logits}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
FEW = {"odd", "aligned", "popular and aligned"}  # the interpreter takes these in float16 too


def run(function: Callable[[Found], Found], inputs: Found) -> None:
    """Logits do not use the weights, whose gradient would be missing."""
    assert_as_good(function, inputs, None if function is all_products else ("queries", "table"))


@functions
@pytest.mark.usefixtures("_short_parts")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}")
        for name in CASES
        for dtype in DTYPES
        if DEVICE == "cuda" or dtype == torch.float32 or name in FEW
    ],
)
def test_values_and_gradients_equal_the_reference(
    name: str, dtype: torch.dtype, function: Callable[[Found], Found]
) -> None:
    run(function, CASES[name].inputs(dtype))


@pytest.mark.gpu
@dtypes
@functions
@pytest.mark.parametrize(
    "case",
    [
        Case(queries=1000, list_size=77, dim=200, rows=999, popular=9),
        Case(queries=4000, list_size=512, dim=256, rows=4096, popular=1, aligned=10),
        Case(queries=129, list_size=33, dim=1030, rows=50),
        Case(queries=70, list_size=9, dim=4096, rows=60),
        Case(queries=3, list_size=5000, dim=64, rows=100_000),
    ],
    ids=str,
)
def test_large_shapes(case: Case, dtype: torch.dtype, function: Callable[[Found], Found]) -> None:
    run(function, case.inputs(dtype))


@pytest.mark.parametrize("function", [logits, unit_logits])
@dtypes
def test_logits_of_operands_of_several_dtypes(
    function: Callable[[Found], Found], dtype: torch.dtype
) -> None:
    for table_dtype in DTYPES:
        run(function, CASES["odd"].inputs(dtype, table_dtype))


def test_operands_of_several_dtypes() -> None:
    """Weights of a router are float32 whatever the model is; the result is in the table's dtype."""
    inputs = CASES["odd"].inputs(torch.float16)
    inputs["weights"] = inputs["weights"].float()

    def total(given: Found) -> Found:
        return {"total": gather_total(given["weights"], given["table"], given["ids"])}

    del inputs["queries"]
    assert_as_good(total, inputs)


@functions
def test_strided_operands_and_short_ids(function: Callable[[Found], Found]) -> None:
    inputs = CASES["odd"].inputs(torch.float32)
    with use_backend("triton"):
        wanted = function(inputs)
        strided = {name: tensor.T.contiguous().T for name, tensor in inputs.items()}
        found = function(strided | {"ids": strided["ids"].int()})
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.usefixtures("_short_parts")
def test_sums_are_the_same_every_time() -> None:
    inputs = CASES["popular"].inputs(torch.float32)
    arguments = (inputs["weights"], inputs["queries"], inputs["ids"], 6)
    with use_backend("triton"):
        assert torch.equal(scatter_total(*arguments), scatter_total(*arguments))


@pytest.mark.parametrize(
    ("function", "free", "unwanted"),
    [
        (dots, "table", "row_totals"),
        (dots, "queries", "row_sums"),
        (unit_logits, "table", "row_totals"),
        (unit_logits, "queries", "table_grads"),
    ],
)
def test_frozen_operands_cost_nothing(
    function: Callable[[Found], Found], free: str, unwanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_triton, unwanted, None)  # calling it would raise
    assert_as_good(function, CASES["odd"].inputs(torch.float32), (free,))


def test_values_are_those_of_the_formula() -> None:
    given = CASES["odd"].inputs(torch.float32)
    hidden, experts = given["queries"].double(), given["table"].double()
    norms = experts.norm(dim=-1)
    wanted = (hidden @ experts.T / norms.where(norms > 0, torch.inf)).gather(-1, given["ids"])
    for backend in ("triton", "reference"):
        with use_backend(backend):
            found = chosen_logits(given["queries"], given["table"], given["ids"], normalize=True)
        assert found.dtype == torch.float32
        assert (found - wanted).abs().max() <= 1e-5
        assert (found[given["ids"] == experts.shape[0] - 1] == 0).all()
