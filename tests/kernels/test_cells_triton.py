"""Grouped products over cells in Triton: scores, experts and gates equal their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from airmoe.errors import ConfigError
from airmoe.kernels import cell_products_triton
from airmoe.kernels.backend import use_backend
from airmoe.kernels.cell_experts import cell_experts
from airmoe.kernels.cell_gates import cell_gates
from airmoe.kernels.cell_scores import cell_scores
from airmoe.kernels.cells import counts_per_entry, make_cells, make_reverse, sort_by_cell
from airmoe.kernels.cells_triton import block_rows, row_tiles, used_entries
from airmoe.kernels.token_experts import Activation, ExpertTables, is_gated
from tests.interpreter import exact_products
from tests.kernels.comparison import (
    DEVICE,
    DTYPES,
    CellCase,
    Found,
    assert_as_good,
    assert_no_worse,
    chosen_mask,
    doubles,
    results_and_grads,
)


@dataclass(frozen=True)
class Case(CellCase):
    top_k: int = 5
    expert_size: int = 1
    activation: Activation = "swiglu"
    sharpness: float = 1.0  # of the scores: where it is large, one expert has nearly all
    aligned: bool = False  # tokens and centroids point nearly the same way, as trained ones do
    counted: bool = False  # the backward knows what nobody chose, and passes over it


CASES = {
    "even": Case((16, 16, 16)),
    "ragged": Case((3, 0, 7, 1, 12, 5, 0, 2, 6, 6)),
    "one huge": Case((2, 100, 1, 0, 3)),
    "all in one": Case((0, 0, 37, 0)),
    "single rows": Case((1,) * 9),
    "long lists": Case((2,) * 64, pool=19),
    "wide": Case((20, 30, 5), dim=80, pool=33, top_k=17),
    "big tiles": Case((70, 90), dim=40),
    "no jitter, raw centroids": Case((9, 11, 4), jitter=False, normalize=False),
    "best only": Case((9, 11, 4), top_k=1),
    "all of the pool": Case((9, 11, 4), top_k=19),
    "aligned": Case((40, 30), dim=64, aligned=True),
    "peaked": Case((20, 12), dim=64, sharpness=25.0, jitter=False),
}


def named(**more: Case) -> Any:
    """Every case in float32; in half precision all of them on a GPU, a few in the interpreter."""
    cases = {**CASES, **more}
    few = {"ragged", "wide", "neurons", "two", "aligned", "peaked"}
    return pytest.mark.parametrize(
        ("case", "dtype"),
        [
            pytest.param(case, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
            for name, case in cases.items()
            for dtype in DTYPES
            if DEVICE == "cuda" or dtype == torch.float32 or case.counted or name in few
        ],
    )


def operands(case: Case, names: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Found:
    return {
        name: torch.randn(shape, device=DEVICE).to(dtype).mul_(scale(name, case))
        for name, shape in names.items()
    }


def scale(name: str, case: Case) -> float:
    return 1.0 if name == "hidden" else case.dim**-0.5


def run(function: Callable[[Found], Found], inputs: Found, dtype: torch.dtype) -> Found:
    """Results and gradients, computed in `dtype`."""
    return results_and_grads(function, {name: value.to(dtype) for name, value in inputs.items()})


def tables_of(given: Found, activation: Activation, size: int = 1) -> ExpertTables:
    return ExpertTables(given.get("gate"), given["up"], given["down"], activation, size)


# -- layout ---------------------------------------------------------------------------------


def test_block_sizes_follow_the_mean_cell() -> None:
    assert [block_rows(n, 10) for n in (10, 160, 320, 330, 640, 9999)] == [32, 32, 32, 64, 64, 64]


def test_reverse_index() -> None:
    pools = CASES["ragged"].cells().pools[:4]
    reverse = make_reverse(pools, 70)
    starts = reverse.starts.tolist()
    entries = reverse.entries.tolist()
    assert sorted(entries) == list(range(pools.numel()))
    flat = pools.flatten().tolist()
    for expert in range(70):
        own = entries[starts[expert] : starts[expert + 1]]
        assert own == [place for place, owner in enumerate(flat) if owner == expert]


@pytest.mark.parametrize("num_experts", [2**16, 2**16 + 1])
def test_reverse_index_of_many_experts(num_experts: int) -> None:
    pools = torch.stack([torch.randperm(num_experts, device=DEVICE)[:50] for _ in range(3)])
    pools[0, 0], pools[1, 0] = 0, num_experts - 1
    pools = pools.sort(-1).values
    reverse = make_reverse(pools, num_experts)
    wanted = pools.flatten().sort(stable=True)
    assert torch.equal(reverse.entries.long(), wanted.indices)
    assert torch.equal(
        reverse.starts.diff().long(), pools.flatten().bincount(minlength=num_experts)
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_sums_by_expert(backend: Literal["reference", "triton"]) -> None:
    cells = CASES["ragged"].cells()
    values = torch.randn(cells.pools.shape, device=DEVICE)
    wanted = torch.zeros(70, dtype=torch.float64, device=DEVICE)
    wanted.index_add_(0, cells.pools.flatten(), values.flatten().double())
    counts = torch.randint(1000, cells.pools.shape, device=DEVICE, dtype=torch.int32)
    wanted_counts = torch.zeros(70, dtype=torch.int32, device=DEVICE)
    wanted_counts.index_add_(0, cells.pools.flatten(), counts.flatten())
    with use_backend(backend):
        reverse = make_reverse(cells.pools, 70)
        found = reverse.sum_by_expert(values)
        assert torch.equal(reverse.sum_by_expert(counts), wanted_counts)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_entries_that_nobody_chose_are_left_out() -> None:
    pools = CASES["ragged"].cells().pools
    reverse = make_reverse(pools, 70)
    counts = torch.randint(3, pools.shape, device=DEVICE, dtype=torch.int32)
    counts[1] = 0
    kept = used_entries(reverse, counts)
    flat, starts = counts.flatten(), reverse.starts.tolist()
    own, kept_starts = reverse.entries.tolist(), kept.starts.tolist()
    for expert in range(70):
        wanted = [entry for entry in own[starts[expert] : starts[expert + 1]] if flat[entry] > 0]
        assert kept.entries[kept_starts[expert] : kept_starts[expert + 1]].tolist() == wanted


@pytest.mark.parametrize("num_cells", [3, 2**15, 2**15 + 1])
def test_rows_are_sorted_by_cell(num_cells: int) -> None:
    cell_ids = torch.randint(num_cells, (3000,), device=DEVICE)
    cell_ids[:2] = num_cells - 1
    row_cells, order, offsets = sort_by_cell(cell_ids, num_cells)
    wanted = cell_ids.sort(stable=True)
    assert torch.equal(row_cells, wanted.values) and torch.equal(order, wanted.indices)
    assert row_cells.dtype == cell_ids.dtype
    assert torch.equal(offsets.diff(), cell_ids.bincount(minlength=num_cells))


def test_sizes_past_what_a_launch_takes_are_refused() -> None:
    with use_backend("triton"):
        with pytest.raises(ConfigError, match=r"cells.rows: got 5000000, makes .* at most 65535"):
            row_tiles(torch.zeros(4, dtype=torch.int64, device=DEVICE), 5_000_000)
        with pytest.raises(ConfigError, match=r"cells.cells: got 70000, .* AIRMOE_BACKEND"):
            row_tiles(torch.zeros(70_001, dtype=torch.int64, device=DEVICE), 10)
    pools = torch.zeros((), dtype=torch.int64).expand(2**16, 2**15)
    with pytest.raises(ConfigError, match=r"cells.pools: got \(65536, 32768\), must have fewer"):
        make_reverse(pools, 10)


@pytest.mark.gpu
def test_more_than_2_31_scores() -> None:
    """Buffers [N, M] whose places do not fit 32 bits: the last rows are as good as the first."""
    rows, pool, dim, top_k = 140_000, 16_384, 32, 64
    pools = torch.arange(pool, device=DEVICE).expand(2, pool).contiguous()
    cells = make_cells(torch.arange(rows, device=DEVICE).view(-1, 1) % 2, pools)
    tables = {
        name: torch.randn(pool, dim, device=DEVICE).bfloat16() * dim**-0.5
        for name in ("centroids", "gate", "up", "down")
    }
    hidden = torch.randn(rows, dim, device=DEVICE).bfloat16()
    valid = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    found = cell_gates(hidden, tables["centroids"], cells, valid, top_k)
    output = cell_experts(hidden, tables_of(tables, "swiglu"), found.gates, cells)
    for row in (0, rows // 2, rows - 1):
        token = cells.token_ids[row]
        state = hidden[token].double()
        scores = tables["centroids"].double() @ state
        gates = found.gates[row].double()
        assert (gates > 0).sum() == top_k
        assert scores[gates > 0].min() >= scores[gates == 0].max() - 1e-5
        torch.testing.assert_close(gates.sum().item(), 1.0, rtol=0, atol=0.02)
        active = silu(tables["gate"].double() @ state) * (tables["up"].double() @ state)
        wanted = (gates * active) @ tables["down"].double()
        torch.testing.assert_close(output[token].double(), wanted, rtol=0.02, atol=1e-3)


# -- scores ---------------------------------------------------------------------------------


def score_inputs(case: Case, dtype: torch.dtype) -> Found:
    shapes = {"hidden": (case.num_tokens, case.dim), "centroids": (case.experts, case.dim)}
    inputs = operands(case, shapes, dtype)
    inputs["hidden"].mul_(case.sharpness)
    if case.aligned:
        for value in inputs.values():
            value.mul_(0.02).add_(1)  # along no axis, where rounding would cancel as well
        inputs["hidden"].mul_(8)
    return inputs


@named(two=Case((9, 11, 4), rows_per_token=2))
def test_scores(case: Case, dtype: torch.dtype) -> None:
    cells, inputs = case.cells(), score_inputs(case, dtype)
    form = case.form(inputs["centroids"])

    def scores(leaves: Found) -> Found:
        return {"scores": cell_scores(leaves["hidden"], leaves["centroids"], cells, **form)}

    assert_as_good(scores, inputs)


# -- gates ----------------------------------------------------------------------------------


@named()
def test_gates(case: Case, dtype: torch.dtype) -> None:
    cells, inputs, valid = case.cells(), score_inputs(case, dtype), case.some_valid()
    with use_backend("triton"):
        fast = results_and_grads(lambda given: case.gates(given, cells, valid, case.top_k), inputs)
    scores = case.scored(**doubles(inputs), cells=cells, valid=valid).scores
    taken, row_valid = fast["gates"] > 0, valid[cells.token_ids]
    assert (taken.sum(-1) == case.top_k * row_valid).all(), "exactly K"
    lowest = scores.masked_fill(~taken, torch.inf).amin(-1)
    best_missed = scores.masked_fill(taken, -torch.inf).amax(-1)
    slack = 16 * torch.finfo(torch.float32).eps * scores.abs().max()
    assert (lowest + slack >= best_missed)[row_valid].all(), "the K best"

    def definition(given: Found) -> Found:
        return case.defined_gates(given, cells, valid, taken, case.top_k)

    with use_backend("reference"):
        exact, plain = (results_and_grads(definition, each) for each in (doubles(inputs), inputs))
    assert_no_worse(fast, plain, exact)


@pytest.mark.parametrize("name", ["ragged", "big tiles", "no jitter, raw centroids", "best only"])
def test_gates_whose_scores_are_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large batches, where all scores would take much memory."""
    monkeypatch.setattr("airmoe.kernels.cell_scores.MANY_ROWS", 0)
    test_gates(CASES[name], torch.float16)


@pytest.mark.parametrize("name", ["ragged", "one huge", "wide", "peaked"])
def test_gates_whose_partial_sums_are_scaled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As bfloat16's are, which the interpreter cannot run. Where most of a sum cancels ("aligned"),
    they are good enough for bfloat16, with an eighth of its error, and not for float16."""
    monkeypatch.setattr(cell_products_triton, "SCALED", (torch.float16,))
    test_gates(CASES[name], torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_softmax_add_up_to_nothing(dtype: torch.dtype) -> None:
    """Also where one expert has nearly all: stored gates are rounded and do not add up to 1, and a
    large gradient times what is missing would drown the small difference that is left."""
    case = Case((40,), dim=64, sharpness=10.0, jitter=False, normalize=False)
    cells, inputs = case.cells(), score_inputs(case, dtype)
    # One coordinate is the same for all experts, so its gradient is the sum of the scores'.
    hidden, centroids = inputs["hidden"].requires_grad_(), inputs["centroids"]
    centroids[:, 0] = 1.0
    valid = torch.ones(case.num_tokens, dtype=torch.bool, device=DEVICE)
    with use_backend("triton"):
        gates = cell_gates(hidden, centroids, cells, valid, case.top_k).gates
        upstream = 200 * (gates.detach() == gates.detach().amax(-1, keepdim=True)).to(dtype)
        upstream += torch.randn_like(upstream)
        (gates * upstream).sum().backward()
    assert hidden.grad is not None
    exact = gates.detach().double()
    exact /= exact.sum(-1, keepdim=True)
    weighted = exact * upstream.double()
    size = (weighted - exact * weighted.sum(-1, keepdim=True)).abs().sum(-1)  # [N]
    # What rounding each stored gradient may leave, and float32 sums of numbers up to 200.
    allowed = 2 * torch.finfo(dtype).eps * size + 16 * torch.finfo(torch.float32).eps * 200
    assert (hidden.grad[cells.token_ids, 0].double().abs() <= allowed).all()


def test_ties_go_to_the_lowest_position() -> None:
    cells = make_cells(torch.zeros(4, 1, dtype=torch.int64, device=DEVICE),
                       torch.arange(20, device=DEVICE).view(1, 20))  # fmt: skip
    hidden, centroids = torch.ones(4, 16, device=DEVICE), torch.ones(20, 16, device=DEVICE)
    valid = torch.ones(4, dtype=torch.bool, device=DEVICE)
    with use_backend("triton"):
        found = cell_gates(hidden, centroids, cells, valid, 7)
    wanted = torch.zeros(4, 20, device=DEVICE)
    wanted[:, :7] = 1 / 7
    torch.testing.assert_close(found.gates, wanted)


# -- experts --------------------------------------------------------------------------------


def expert_inputs(case: Case, dtype: torch.dtype) -> Found:
    table = (case.experts * case.expert_size, case.dim)
    shapes = {"hidden": (case.num_tokens, case.dim), "up": table, "down": table}
    if is_gated(case.activation):
        shapes["gate"] = table
    shapes["scores"] = (sum(case.sizes), case.pool)
    return operands(case, shapes, dtype)


@named(
    two=Case((9, 11, 4), rows_per_token=2),
    neurons=Case((9, 11, 4), expert_size=3),
    geglu=Case((9, 11, 4), activation="geglu"),
    geglu_tanh=Case((9, 11, 4), activation="geglu_tanh"),
    gelu=Case((9, 11, 4), activation="gelu"),
    relu=Case((9, 11, 4), activation="relu"),
    silu=Case((9, 11, 4), activation="silu", expert_size=2, rows_per_token=2),
    **{
        f"{name}, counted": replace(CASES[name], counted=True)
        for name in ("even", "ragged", "one huge", "wide")
    },
)
def test_experts(case: Case, dtype: torch.dtype) -> None:
    cells, inputs, counts = case.cells(), expert_inputs(case, dtype), None
    mask = chosen_mask(inputs["scores"], case.top_k)
    if case.counted:
        with use_backend("triton"):
            counts = counts_per_entry(mask.to(dtype), cells.layout().tensors())

    def experts(leaves: Found) -> Found:
        gates = leaves["scores"].square() * mask
        tables = tables_of(leaves, case.activation, case.expert_size)
        return {"output": cell_experts(leaves["hidden"], tables, gates, cells, counts=counts)}

    assert_as_good(experts, inputs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_extreme_experts(activation: Activation, dtype: torch.dtype) -> None:
    """Of a pool, chosen or not; where nobody chose it, not even an overflow shows."""
    case = Case((9, 11), pool=6, experts=6, activation=activation)
    cells, inputs = case.cells(), expert_inputs(case, dtype)
    mask = torch.rand_like(inputs["scores"]) < 0.6
    mask[:, 0] = False
    inputs["hidden"][:, 0] = 4
    inputs["down"] /= 16  # float16 ends at 65504
    for pre in [inputs[name] for name in ("up", "gate") if name in inputs][-1:]:
        pre[:3, 0] = torch.tensor([torch.finfo(dtype).max, 2.5e3, -2.5e3])

    def experts(leaves: Found) -> Found:
        gates = leaves["scores"].square() / 8 * mask
        tables = tables_of(leaves, activation)
        return {"output": cell_experts(leaves["hidden"], tables, gates, cells)}

    exact, plain = run(experts, inputs, torch.float64), run(experts, inputs, dtype)
    for name, value in plain.items():
        unit = torch.finfo(dtype).eps * exact[name].abs().max()
        assert (value - exact[name]).abs().max() <= 16 * unit, name
    if dtype in DTYPES:  # the interpreter knows no bfloat16
        with use_backend("triton"):
            assert_no_worse(run(experts, inputs, dtype), plain, exact)


@pytest.mark.parametrize(
    ("case", "part_bytes"),
    [
        (CASES["ragged"], 5000),
        (CASES["long lists"], 20_000),
        (Case((3, 0, 2), experts=12, pool=4), 40),
    ],
    ids=["some", "long lists", "more than entries"],
)
def test_weight_gradients_in_parts(
    case: Case, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever memory the partial sums get, the result is the same to the bit."""
    cells, inputs = case.cells(), expert_inputs(case, torch.float32)

    def experts(leaves: Found) -> Found:
        tables = tables_of(leaves, case.activation)
        return {"output": cell_experts(leaves["hidden"], tables, leaves["scores"], cells)}

    with use_backend("triton"), exact_products():
        whole = run(experts, inputs, torch.float32)
        monkeypatch.setattr(cell_products_triton, "PART_BYTES", part_bytes)
        parts = run(experts, inputs, torch.float32)
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("mean", [2, 30])
def test_sums_of_short_and_long_lists(
    mean: int, projected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, with so many experts that a program takes several of them, one after another."""
    on_gpu = DEVICE == "cuda"
    cells, pool, dim = (256, 128, 256) if on_gpu else (40, 6, 24)
    dtype = torch.bfloat16 if on_gpu else torch.float16  # the interpreter knows no bfloat16
    monkeypatch.setattr(cell_products_triton, "SCALED", (dtype,))
    monkeypatch.setattr(cell_products_triton, "REDUCE_PROGRAMS", 100 if on_gpu else 3)
    case = CellCase(tuple([3, 0, 5, 1] * (cells // 4)), dim, pool, cells * pool // mean)
    layout = case.cells().layout()
    x = torch.randn(layout.num_rows, pool, device=DEVICE).to(dtype)
    values = torch.randn(case.num_tokens, dim, device=DEVICE).to(dtype)
    table = torch.randn(case.experts, dim, device=DEVICE).to(dtype)
    norms = 1 / table.float().norm(dim=-1) if projected else None

    def run() -> Tensor:
        products = {"table": (x, values, table)}
        return cell_products_triton.table_gradients(products, layout, inverse_norms=norms)["table"]

    with use_backend("triton"):
        found = run()
        assert torch.equal(run(), found)
    exact, sizes = torch.zeros(2, case.experts, dim, dtype=torch.float64, device=DEVICE)
    for cell, (start, stop) in enumerate(pairwise(layout.offsets.tolist())):
        left = x[start:stop].double().T
        right = values[layout.token_ids[start:stop]].double()
        exact.index_add_(0, layout.pools[cell], left @ right)
        sizes.index_add_(0, layout.pools[cell], left.abs() @ right.abs())
    if norms is not None:
        unit = table.double() * norms.double().unsqueeze(-1)
        exact -= unit * (exact * unit).sum(-1, keepdim=True)
    error = (found.double() - exact).norm(dim=-1)
    assert (error <= torch.finfo(dtype).eps * sizes.norm(dim=-1)).all()


def test_what_is_frozen_gets_no_gradient() -> None:
    case = CASES["ragged"]
    cells, inputs = case.cells(), expert_inputs(case, torch.float32)
    inputs["hidden"].requires_grad_()
    inputs["down"].requires_grad_()
    with use_backend("triton"):
        tables = tables_of(inputs, "swiglu")
        cell_experts(inputs["hidden"], tables, inputs["scores"], cells).sum().backward()
    assert inputs["up"].grad is None and inputs["scores"].grad is None
    assert inputs["hidden"].grad is not None and inputs["down"].grad is not None
