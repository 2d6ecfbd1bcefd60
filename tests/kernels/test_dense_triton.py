"""Exact top-K on Triton: the reference's experts in the reference's order, up to ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.dense import best_experts
from airmoe.kernels.noise import Noise
from airmoe.kernels.noise.reference import normal
from tests.tolerance import score_slack

pytest.importorskip("triton")
from airmoe.kernels.dense.triton import best_experts_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAM = "airmoe.kernels.shortlist.triton"


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several levels of thinning and several pieces of everything, at sizes a test can pay for."""
    monkeypatch.setattr(f"{STREAM}.SEGMENT", 64)
    monkeypatch.setattr(f"{STREAM}.ROWS", 4)
    monkeypatch.setattr(f"{STREAM}.SCORE_ELEMENTS", 500)
    monkeypatch.setattr("airmoe.kernels.dense.triton.SORT_ELEMENTS", 20)


def any_noise(rows: int) -> Noise:
    keys = torch.randint(-(2**31), 2**31, (rows,), device=DEVICE).to(torch.int32)
    return Noise(keys, 0.3)


def logits_of(hidden: Tensor, experts: Tensor, noise: Noise | None) -> Tensor:
    logits = hidden @ experts.T
    if noise is None:
        return logits
    columns = torch.arange(experts.shape[0], device=DEVICE)
    return logits + normal(noise.row_keys.unsqueeze(-1), columns) * noise.std


def check(hidden: Tensor, experts: Tensor, count: int, noise: Noise | None = None) -> Tensor:
    with use_backend("triton"):
        ids = best_experts(hidden, experts, count, noise)
    assert ids.shape == (hidden.shape[0], count) and ids.dtype == torch.int64
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()  # distinct
    exact = logits_of(hidden.double(), experts.double(), noise)
    slack = score_slack(exact, logits_of(hidden.float(), experts.float(), noise))
    best = exact.topk(count, dim=-1).values
    assert ((exact.gather(-1, ids) - best).abs() <= slack).all()  # the best ones, best first
    return ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "experts", "dim", "count"), [(1, 16, 16, 16), (6, 150, 24, 20), (17, 70, 33, 1)]
)
def test_one_segment(dtype: torch.dtype, tokens: int, experts: int, dim: int, count: int) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE).to(dtype)
    table = torch.randn(experts, dim, device=DEVICE).to(dtype)
    check(hidden, table, count)
    check(hidden, table, count, any_noise(tokens))


def test_float32_tokens_and_bfloat16_experts() -> None:
    hidden, table = torch.randn(6, 24, device=DEVICE), torch.randn(150, 24, device=DEVICE)
    check(hidden, table.bfloat16(), 20)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("count", [1, 16])
def test_many_segments(count: int) -> None:
    hidden, table = torch.randn(5, 20, device=DEVICE), torch.randn(400, 20, device=DEVICE)
    check(hidden, table, count, any_noise(5))


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("dim", [16, 40])
def test_both_tables_in_three_parts(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airmoe.kernels.dense.triton.SPLIT_TOKENS", 1)
    hidden, table = torch.randn(5, dim, device=DEVICE), torch.randn(150, dim, device=DEVICE)
    check(hidden, table, 9, any_noise(5))


@pytest.mark.usefixtures("small_segments")
def test_ties_go_to_the_lowest_id() -> None:
    hidden = torch.eye(8, device=DEVICE)[:3]
    hidden[2] = 0
    table = torch.randint(-1, 2, (200, 8), device=DEVICE).float()
    ids = check(hidden, table, 30)
    with use_backend("reference"):
        assert torch.equal(ids, best_experts(hidden, table, 30))
    assert ids[2].tolist() == list(range(30))


@pytest.mark.usefixtures("small_segments")
def test_a_list_too_long_for_the_kernel_is_the_references() -> None:
    check(torch.randn(3, 16, device=DEVICE), torch.randn(200, 16, device=DEVICE), 50)


def test_no_tokens() -> None:
    with use_backend("triton"):
        ids = best_experts(torch.empty(0, 16, device=DEVICE), torch.randn(30, 16, device=DEVICE), 4)
    assert ids.shape == (0, 4)


def test_the_operator_is_registered_completely() -> None:
    arguments = (torch.randn(3, 16, device=DEVICE), torch.randn(30, 16, device=DEVICE), 4)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(best_experts_op, (*arguments, None, 0.0), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "experts", "dim", "count"),
    [
        (2000, 65_536, 256, 512),
        (777, 20_001, 100, 300),
        (8, 1_000_003, 64, 512),
        (1, 40_000, 1024, 1),
        (33, 5000, 4096, 64),
    ],
)
def test_large_odd_shapes(
    dtype: torch.dtype, tokens: int, experts: int, dim: int, count: int
) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=dtype)
    table = torch.nn.functional.normalize(torch.randn(experts, dim, device=DEVICE), dim=-1)
    check(hidden, table.to(dtype), count, any_noise(tokens))
    if dtype == torch.bfloat16:
        check(hidden.float(), table.to(dtype), count)


@pytest.mark.gpu
def test_can_be_captured_in_a_graph() -> None:
    hidden = torch.randn(8, 64, device=DEVICE)
    table = torch.randn(100_000, 64, device=DEVICE)
    expected = best_experts(hidden, table, 100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = best_experts(hidden, table, 100)
    graph.replay()
    assert torch.equal(ids, expected)
