"""Expert choice over cells in Triton: who is taken, gates and gradients equal the definition's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from airmoe import AirRouter
from airmoe.kernels import expert_choice_triton
from airmoe.kernels.backend import use_backend
from airmoe.kernels.cell_gates import cell_gates
from airmoe.kernels.cells import Cells, make_cells
from airmoe.routers.routing import CellRouting
from tests.kernels.comparison import (
    DEVICE,
    DTYPES,
    CellCase,
    Found,
    assert_no_worse,
    doubles,
    results_and_grads,
)


@dataclass(frozen=True)
class Case(CellCase):
    experts: int = 14
    pool: int = 8
    capacity: int = 0

    def inputs(self, dtype: torch.dtype) -> Found:
        shapes = {"hidden": (self.num_tokens, self.dim), "centroids": (self.experts, self.dim)}
        return {k: torch.randn(shape, device=DEVICE).to(dtype) for k, shape in shapes.items()}


CASES = {
    "ragged": Case((3, 0, 7, 1, 12, 5, 0, 2, 6, 6), capacity=8),
    "more room than candidates, experts in no pool": Case((9, 11, 4), capacity=50, experts=30),
    "no room": Case((4, 1, 4), capacity=0),
    "everyone in every pool": Case((20, 0, 13), capacity=5, experts=8),
    "several blocks of keys": Case((40, 1, 25), capacity=16, experts=9),
    "several blocks of a row": Case((6, 5), capacity=4, experts=21, pool=19),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that loops over blocks have more than one turn at sizes the interpreter can take."""
    monkeypatch.setattr(expert_choice_triton, "KEY_BLOCK", 32)
    monkeypatch.setattr(expert_choice_triton, "ROW_BLOCK", 16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
        for name, case in CASES.items()
        for dtype in DTYPES
        if DEVICE == "cuda" or dtype == torch.float32 or name == "ragged"
    ],
)
def test_gates_and_gradients(case: Case, dtype: torch.dtype) -> None:
    cells, inputs, valid = case.cells(), case.inputs(dtype), case.some_valid()
    with use_backend("triton"):
        fast = results_and_grads(
            lambda given: case.gates(given, cells, valid, capacity=case.capacity), inputs
        )
    taken = fast["gates"] > 0
    assert_best_are_taken(taken, inputs, cells, valid, case)

    def definition(given: Found) -> Found:
        return case.defined_gates(given, cells, valid, taken)

    with use_backend("reference"):
        exact, plain = (results_and_grads(definition, each) for each in (doubles(inputs), inputs))
    assert_no_worse(fast, plain, exact)


@pytest.mark.usefixtures("small_blocks")
def test_gates_whose_scores_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large batches, where all scores would take much memory."""
    monkeypatch.setattr("airmoe.kernels.cell_scores.MANY_ROWS", 0)
    test_gates_and_gradients(CASES["ragged"], torch.float16)


def assert_best_are_taken(
    taken: Tensor, inputs: Found, cells: Cells, valid: Tensor, case: Case
) -> None:
    scored = case.scored(**doubles(inputs), cells=cells, valid=valid)
    probs = scored.probs(scored.log_z())
    usable = valid[cells.token_ids].unsqueeze(-1).expand_as(taken)
    assert not (taken & ~usable).any(), "tokens that do not count are not taken"
    owners = cells.pools[cells.cell_of_row]
    for expert in range(case.experts):
        own = (owners == expert) & usable
        assert (own & taken).sum() == min(case.capacity, int(own.sum())), expert
        least = probs[own & taken].amin() if (own & taken).any() else torch.inf
        missed = probs[own & ~taken].amax() if (own & ~taken).any() else 0.0
        # With no room all are missed; else float32 sums may swap two that are as good as equal.
        assert case.capacity == 0 or least >= missed * (1 - 1e-5), expert


@pytest.mark.parametrize(("capacity", "takes"), [(1, [0]), (3, [0, 1, 3]), (4, [0, 1, 3, 4])])
def test_ties_go_to_the_lowest_token(capacity: int, takes: list[int]) -> None:
    """Equal tokens are no rarity: the first ones of two texts that begin alike are."""
    cell_ids = torch.tensor([1, 0, 1, 0, 0, 1, 1], device=DEVICE).view(-1, 1)
    pools = torch.arange(4, device=DEVICE).expand(2, 4).contiguous()
    cells = make_cells(cell_ids, pools)
    hidden, centroids = torch.ones(7, 16, device=DEVICE), torch.ones(4, 16, device=DEVICE)
    valid = torch.tensor([True, True, False, True, True, True, True], device=DEVICE)
    with use_backend("triton"):
        room = torch.tensor(capacity, device=DEVICE)
        gates = cell_gates(hidden, centroids, cells, valid, None, capacity=room).gates
    by_token = torch.zeros_like(gates).index_copy(0, cells.token_ids, gates)
    wanted = torch.zeros(7, 4, device=DEVICE)
    wanted[takes] = 1 / 4
    torch.testing.assert_close(by_token, wanted)


def test_small_probabilities_stay_chosen_in_half_precision() -> None:
    case = CASES["everyone in every pool"]
    cells, inputs = case.cells(), case.inputs(torch.float16)
    valid = torch.ones(case.num_tokens, dtype=torch.bool, device=DEVICE)
    inputs["hidden"] *= 6  # the least probable ones are below what float16 can hold
    with use_backend("triton"):
        gates = case.gates(inputs, cells, valid, capacity=case.num_tokens)["gates"]
    assert gates.dtype == torch.float16 and (gates.float() == 2.0**-24).any()
    assert (gates > 0).all()


def test_nan_shows() -> None:
    case = CASES["no room"]
    cells, inputs = case.cells(), case.inputs(torch.float32)
    inputs["centroids"][int(cells.pools[0, 3])] = torch.nan
    valid = torch.ones(case.num_tokens, dtype=torch.bool, device=DEVICE)
    with use_backend("triton"):
        gates = case.gates(inputs, cells, valid, capacity=2)["gates"]
    assert gates[: int(cells.offsets[1])].isnan().all()


def test_router_takes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AirRouter.Config(
        dim=16, num_experts=24, top_k=4, num_codewords=5, shortlist_size=9, jitter_std=0.0,
        gate="expert_choice", capacity_factor=0.4,
    )  # fmt: skip
    router = config.build().to(DEVICE)
    hidden = torch.randn(40, 16, device=DEVICE)
    mask = torch.ones(40, dtype=torch.bool, device=DEVICE)
    mask[35:] = False
    with use_backend("reference"):
        wanted = router(hidden, mask)

    def never(*_: object) -> None:
        raise AssertionError("sorted all candidates")

    monkeypatch.setattr("airmoe.routers.air.expert_choice_gates", never)
    with use_backend("triton"):
        found = router(hidden, mask)
        counts = found.expert_counts
    assert isinstance(found, CellRouting) and found.max_per_token is None
    assert torch.equal(found.gates > 0, wanted.gates > 0)
    torch.testing.assert_close(found.gates, wanted.gates)
    assert torch.equal(counts, wanted.expert_counts)
