"""Shortlists on Triton: the reference's experts, up to ties within rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.noise import Noise, normal
from airmoe.kernels.shortlist import top_m
from tests.tolerance import score_slack

pytest.importorskip("triton")
from airmoe.kernels.shortlist_triton import Cut, plan_cuts, top_m_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODULE = "airmoe.kernels.shortlist_triton"


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several levels of thinning and several pieces of everything, at sizes a test can pay for."""
    monkeypatch.setattr(f"{MODULE}.SEGMENT", 64)
    monkeypatch.setattr(f"{MODULE}.ROWS", 4)
    monkeypatch.setattr(f"{MODULE}.SCORE_ELEMENTS", 500)
    monkeypatch.setattr(f"{MODULE}.CANDIDATE_ELEMENTS", 300)


def unit_rows(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, device=DEVICE), dim=-1)


def any_noise(rows: int) -> Noise:
    keys = torch.randint(-(2**31), 2**31, (rows,), device=DEVICE).to(torch.int32)
    return Noise(keys, 0.05)


def scores_of(
    codewords: Tensor, centroids: Tensor, scale: Tensor | None, noise: Noise | None
) -> Tensor:
    scores = codewords @ centroids.to(codewords.dtype).T
    if scale is not None:
        scores = scores * scale
    if noise is not None:
        experts = torch.arange(centroids.shape[0], device=DEVICE)
        scores = scores + normal(noise.row_keys.unsqueeze(-1), experts) * noise.std
    return scores


def assert_best(ids: Tensor, exact: Tensor, slack: float) -> None:
    """Ascending, distinct, and the best ones up to `slack`."""
    assert ids.dtype == torch.int64
    assert ((ids[:, 1:] > ids[:, :-1]).all()) and ids.min() >= 0 and ids.max() < exact.shape[1]
    kth = exact.topk(ids.shape[1], dim=-1).values[:, -1:]
    assert (exact.gather(-1, ids) >= kth - slack).all()
    missed = exact.scatter(-1, ids, -torch.inf)
    assert (missed <= kth + slack).all()


def check(
    codewords: Tensor,
    centroids: Tensor,
    size: int,
    scale: Tensor | None = None,
    noise: Noise | None = None,
) -> Tensor:
    out = torch.full((codewords.shape[0], size), -1, dtype=torch.int64, device=DEVICE)
    with use_backend("triton"):
        returned = top_m(codewords, centroids, size, inverse_norms=scale, noise=noise, out=out)
    assert returned is out  # the address is fixed
    exact = scores_of(codewords.double(), centroids, scale, noise)
    plain = scores_of(codewords, centroids, scale, noise)
    assert_best(out, exact, score_slack(exact, plain))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("codewords", "experts", "dim", "size"), [(1, 16, 16, 16), (5, 200, 24, 30), (20, 70, 33, 1)]
)
def test_one_segment(dtype: torch.dtype, codewords: int, experts: int, dim: int, size: int) -> None:
    centroids = torch.randn(experts, dim, device=DEVICE, dtype=dtype)
    scale = 1 / centroids.float().norm(dim=-1)
    check(unit_rows(codewords, dim), centroids, size)
    check(unit_rows(codewords, dim), centroids, size, scale, any_noise(codewords))


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("size", [1, 7, 16])
def test_many_segments(size: int) -> None:
    centroids = torch.randn(400, 20, device=DEVICE)
    scale = 1 / centroids.norm(dim=-1)
    cuts = plan_cuts(400, size)
    assert cuts is not None and len(cuts) == (3 if size == 16 else 2)
    check(unit_rows(5, 20), centroids, size, scale, any_noise(5))


@pytest.mark.usefixtures("small_segments")
def test_ties_go_to_the_lowest_id() -> None:
    codewords = torch.eye(8, device=DEVICE)[:3]
    centroids = torch.randint(-1, 2, (200, 8), device=DEVICE).float()
    centroids[:, 2] = 0  # all alike
    for size in (1, 25):
        out = check(codewords, centroids, size)
        with use_backend("reference"):
            assert torch.equal(out, top_m(codewords, centroids, size))
        assert out[2].tolist() == list(range(size))


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("row", [0, 5])
def test_a_codeword_that_is_not_finite_leaves_the_others_alone(row: int) -> None:
    codewords, centroids = unit_rows(6, 16), torch.randn(150, 16, device=DEVICE)
    expected = check(codewords, centroids, 10)
    for value in (torch.nan, torch.inf):
        codewords[row, 3] = value
        with use_backend("triton"):
            out = top_m(codewords, centroids, 10)
        others = torch.arange(6, device=DEVICE) != row
        assert torch.equal(out[others], expected[others])
        assert out.min() >= 0 and out.max() < 150  # nobody may be led outside the tables


@pytest.mark.usefixtures("small_segments")
def test_a_list_too_long_for_the_kernel_is_the_references() -> None:
    codewords, centroids = unit_rows(3, 16), torch.randn(200, 16, device=DEVICE)
    assert plan_cuts(200, 50) is None
    check(codewords, centroids, 50)


def test_the_plan_of_large_tables() -> None:
    assert plan_cuts(65_536, 2048) == [Cut(65_536, 4, 16_384), Cut(8192, 1, 8192)]
    cuts = plan_cuts(1_048_576, 2048)
    assert cuts is not None and [cut.segments for cut in cuts] == [64, 8, 1]
    for columns in (16_384, 16_385, 70_001, 999_999, 1 << 22):
        for count in (1, 100, 512, 2048, 4096):
            cuts = plan_cuts(columns, count)
            assert cuts is not None
            for cut in cuts:
                assert cut.width <= 16_384 and cut.segments * cut.width >= cut.columns
                assert cut.columns - (cut.segments - 1) * cut.width >= count


def test_the_operator_is_registered_completely() -> None:
    out = torch.empty(3, 5, dtype=torch.int64, device=DEVICE)
    noise = any_noise(3)
    arguments = (unit_rows(3, 16), torch.randn(30, 16, device=DEVICE), None, noise.row_keys, 0.1)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(top_m_op, (*arguments, out), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("codewords", "experts", "dim", "size"),
    [
        (1024, 65_536, 256, 2048),
        (77, 50_001, 100, 1000),
        (13, 16_385, 1024, 4096),
        (600, 3000, 65, 2999),
        (3, 300_000, 64, 512),
    ],
)
def test_large_odd_shapes(
    dtype: torch.dtype, codewords: int, experts: int, dim: int, size: int
) -> None:
    centroids = torch.randn(experts, dim, device=DEVICE, dtype=dtype)
    scale = 1 / centroids.float().norm(dim=-1)
    check(unit_rows(codewords, dim), centroids, size, scale, any_noise(codewords))


@pytest.mark.gpu
def test_memory_does_not_grow_with_codewords() -> None:
    centroids = torch.randn(65_536, 64, device=DEVICE, dtype=torch.bfloat16)
    codewords = unit_rows(2048, 64)
    out = torch.empty(2048, 2048, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with use_backend("triton"):
        top_m(codewords, centroids, 2048, out=out)
    assert torch.cuda.max_memory_allocated() - before <= 96 << 20
