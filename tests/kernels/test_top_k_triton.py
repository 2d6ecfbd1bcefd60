"""Selection and gates on Triton against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.top_k import top_k_gates
from tests.kernels.comparison import DEVICE, chosen_mask
from tests.tolerance import assert_close

pytest.importorskip("triton")
from airmoe.kernels.top_k_triton import gates_from_scores, smallest_gate

INF = float("inf")


def reference_gates(scores: Tensor, valid: Tensor, count: int) -> Tensor:
    with use_backend("reference"):
        return top_k_gates(scores, valid, count)


def assert_gates(gates: Tensor, scores: Tensor, valid: Tensor, count: int) -> None:
    """Exactly the reference's choice; values as close as the plain formula, or one rounding."""
    expected = reference_gates(scores.float(), valid, count)
    exact = reference_gates(scores.double(), valid, count)
    assert torch.equal(gates > 0, expected > 0)
    assert torch.equal((gates > 0).sum(-1), valid * count)
    if gates.dtype == torch.float32:
        assert_close(gates, exact, expected, "gates")
    else:  # one rounding, and what is too small for the dtype is its smallest number
        rounding = torch.finfo(gates.dtype).eps / 2 * exact + 4e-6 * exact
        assert ((gates.double() - exact).abs() <= rounding + smallest_gate(gates.dtype)).all()


def forward(scores: Tensor, count: int, valid: Tensor | None = None) -> Tensor:
    if valid is None:
        valid = torch.ones(scores.shape[0], dtype=torch.bool, device=DEVICE)
    with use_backend("triton"):
        gates = top_k_gates(scores, valid, count)
    assert_gates(gates, scores, valid, count)
    return gates


@pytest.mark.parametrize("columns", [1, 3, 16, 45, 128, 300])
def test_chosen_and_gates_are_the_references(columns: int) -> None:
    scores = torch.randn(6, columns, device=DEVICE) * 3
    valid = torch.tensor([True, False, True, True, True, True], device=DEVICE)
    for count in sorted({1, min(2, columns), max(1, columns // 3), columns}):
        forward(scores, count, valid)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ties_go_to_the_lowest_position(dtype: torch.dtype) -> None:
    scores = torch.randint(-2, 3, (6, 70), device=DEVICE).to(dtype)
    scores[0] = 0
    scores[1] = -0.0
    scores[2, ::2], scores[2, 1::2] = -0.0, 0.0
    scores[3] = 1e-3 * torch.randn(70, device=DEVICE).to(dtype)
    scores[3, 10:50] = 0
    for count in (1, 7, 33, 70):
        forward(scores, count)


def test_minus_infinity_is_chosen_only_when_nothing_else_is_left() -> None:
    scores = torch.randn(5, 40, device=DEVICE)
    scores[0, 5:] = -INF
    scores[1, ::2] = -INF
    scores[2, 1:] = -INF
    scores[3, 39] = -INF
    for count in (2, 5, 6, 20, 39, 40):
        forward(scores, count)


def test_extreme_scores() -> None:
    scores = torch.randn(6, 33, device=DEVICE)
    scores[0] *= 1e38
    scores[1] *= 1e-42  # not normal
    scores[2, :5] = 3e38
    scores[2, 5:] = -3e38
    scores[3] = 2.0 ** torch.arange(-120, 12, 4, device=DEVICE)[:33]
    scores[4] = -scores[3]
    scores[5, 0] = 1e30
    for count in (2, 5, 8, 32):
        valid = torch.ones(6, dtype=torch.bool, device=DEVICE)
        with use_backend("triton"):
            gates = top_k_gates(scores, valid, count)
        assert torch.equal(gates > 0, chosen_mask(scores, count))


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    clean = torch.randn(5, 20, device=DEVICE)
    scores = clean.clone()
    scores[0] = torch.nan
    scores[2, 3] = torch.nan
    scores[4, :4] = INF
    valid = torch.ones(5, dtype=torch.bool, device=DEVICE)
    with use_backend("triton"):
        gates, expected = (top_k_gates(each, valid, 4) for each in (scores, clean))
    assert torch.equal(gates[1::2], expected[1::2])
    assert torch.equal((gates[4] > 0).sum(), torch.tensor(4, device=DEVICE))
    assert gates[0].isnan().any() and gates[2].isnan().any(), "a diverged router must show"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 9])
def test_a_buffer_of_scattered_rows(dtype: torch.dtype, count: int) -> None:
    scores = torch.randn(7, 50, device=DEVICE) * 4
    row_ids = torch.tensor([4, -1, 0, 5, 2, -1, 1], dtype=torch.int32, device=DEVICE)
    valid = torch.tensor([True, True, True, False, True, False], device=DEVICE)
    gates = torch.full((6, 50), 7.0, device=DEVICE, dtype=dtype)
    log_z = torch.full((6,), 7.0, device=DEVICE)
    scores[1] = torch.nan  # rows of nobody hold anything
    gates_from_scores(scores, valid, count, gates, log_z, row_ids=row_ids)
    assert (gates[3] == 7).all() and log_z[3] == 7  # nobody's
    for place, row in enumerate(row_ids.tolist()):
        if row >= 0:
            each = slice(place, place + 1), slice(row, row + 1)
            assert_gates(gates[each[1]], scores[each[0]], valid[each[1]], count)
            exact = scores[each[0]].double().logsumexp(-1) * valid[each[1]]
            plain = scores[each[0]].logsumexp(-1) * valid[each[1]]
            assert_close(log_z[each[1]], exact, plain, "log_z")


@pytest.mark.parametrize("count", [1, 5])
def test_rows_too_long_for_registers(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in plain PyTorch, on any device."""
    monkeypatch.setattr("airmoe.kernels.top_k.LONGEST_ROW", 64)
    monkeypatch.setattr("airmoe.kernels.top_k_triton.top_k_gates", None)  # calling it would raise
    valid = torch.tensor([True, True, False, True, True, True, False], device=DEVICE)
    scores = torch.randn(7, 100, device=DEVICE)
    forward(scores, count, valid)
    check_gradient(scores, valid, count)


def gradient(scores: Tensor, valid: Tensor, count: int, upstream: Tensor) -> Tensor:
    leaf = scores.detach().clone().requires_grad_()
    top_k_gates(leaf, valid, count).backward(upstream.to(leaf.dtype))
    assert leaf.grad is not None
    return leaf.grad


def check_gradient(scores: Tensor, valid: Tensor, count: int) -> None:
    upstream = torch.randn_like(scores)
    with use_backend("triton"):
        actual = gradient(scores, valid, count, upstream)
    with use_backend("reference"):
        plain = gradient(scores, valid, count, upstream)
        exact = gradient(scores.double(), valid, count, upstream)
    assert_close(actual, exact, plain, "gradient", logits=scores.abs().max().item())


@pytest.mark.parametrize("count", [1, 2, 20, 45])
def test_gradient(count: int) -> None:
    scores = torch.randn(5, 45, device=DEVICE)
    valid = torch.tensor([True, True, False, True, True], device=DEVICE)
    check_gradient(scores, valid, count)


def test_gradients_of_rounded_gates_add_up_to_nothing() -> None:
    """Half-precision gates do not add up to 1, and one of them has a large gradient."""
    scores = 3 * torch.randn(50, 40, device=DEVICE).half()
    valid = torch.ones(50, dtype=torch.bool, device=DEVICE)
    upstream = torch.randn(50, 40, device=DEVICE)
    upstream[torch.arange(50), scores.argmax(-1)] = 200.0
    with use_backend("triton"):
        grads = gradient(scores, valid, 8, upstream.half()).double()
    eps = torch.finfo(torch.float16).eps
    assert (grads.sum(-1).abs() <= eps * grads.abs().sum(-1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(4096, 2048, 512), (777, 2047, 512), (300, 4096, 1000), (99, 16384, 512), (31, 9999, 1)],
)
def test_large_odd_shapes(dtype: torch.dtype, rows: int, columns: int, count: int) -> None:
    scores = torch.randn(rows, columns, device=DEVICE, dtype=dtype)  # half types: many ties
    valid = torch.rand(rows, device=DEVICE) < 0.9
    forward(scores, count, valid)
    check_gradient(scores.float(), valid, count)
    gates = torch.empty(rows, columns, device=DEVICE, dtype=dtype)
    log_z = torch.empty(rows, device=DEVICE)
    row_ids = torch.randperm(rows, device=DEVICE, dtype=torch.int32)
    gates_from_scores(scores.float(), valid, count, gates, log_z, row_ids=row_ids)
    assert_gates(gates[row_ids.long()], scores, valid[row_ids.long()], count)
