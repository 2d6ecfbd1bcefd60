"""Nearest codewords on Triton: the reference's choice, up to ties within rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels.assign import assign
from airmoe.kernels.backend import use_backend
from tests.tolerance import assert_top_k, score_slack

pytest.importorskip("triton")
from airmoe.kernels.assign.triton import bfloat16_parts, nearest_codeword

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def similarity(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    products = hidden.to(codewords.dtype) @ codewords.T
    return products - codewords.square().sum(-1) / 2 if euclidean else products


def assert_nearest(nearest: Tensor, hidden: Tensor, codewords: Tensor, euclidean: bool) -> None:
    assert nearest.shape == (hidden.shape[0], 1) and nearest.dtype == torch.int64
    exact = similarity(hidden, codewords.double(), euclidean)
    plain = similarity(hidden, codewords, euclidean)
    slack = score_slack(exact, plain)
    chosen = exact.gather(-1, nearest).squeeze(-1)
    assert (chosen >= exact.amax(-1) - slack).all()
    for row in range(min(8, hidden.shape[0])):
        assert_top_k(nearest[row].tolist(), exact[row], 1, slack, f"token {row}")


def check(hidden: Tensor, codewords: Tensor, euclidean: bool) -> None:
    with use_backend("triton"):
        nearest = assign(hidden, codewords, euclidean=euclidean)
    assert_nearest(nearest, hidden, codewords, euclidean)


def unit_rows(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, device=DEVICE), dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("euclidean", [False, True])
@pytest.mark.parametrize(
    ("tokens", "codewords", "dim"), [(1, 1, 1), (7, 5, 20), (150, 130, 33), (40, 300, 64)]
)
def test_the_nearest(
    dtype: torch.dtype, euclidean: bool, tokens: int, codewords: int, dim: int
) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=dtype)
    check(hidden, unit_rows(codewords, dim) * (1.5 if euclidean else 1), euclidean)


def test_ties_go_to_the_lowest_id() -> None:
    codewords = unit_rows(200, 16)
    codewords[150] = codewords[140] = codewords[3]
    hidden = codewords[[150, 140, 3, 7]].clone()
    hidden[3] = 0  # nearest to all alike
    with use_backend("triton"):
        nearest = assign(hidden, codewords, euclidean=False)
    assert nearest.squeeze(-1).tolist() == [3, 3, 3, 0]


def test_several_nearest_are_left_to_the_reference() -> None:
    hidden, codewords = torch.randn(9, 16, device=DEVICE), unit_rows(30, 16)
    with use_backend("triton"):
        nearest = assign(hidden, codewords, euclidean=False, count=3)
    expected = (hidden @ codewords.T).topk(3).indices
    assert torch.equal(nearest, expected)


def test_three_parts_add_up_to_the_number() -> None:
    values = torch.randn(40, 30, device=DEVICE) * 2.0 ** torch.randint(-60, 60, (40, 30)).to(DEVICE)
    parts = bfloat16_parts(values)
    assert torch.equal(parts, parts.to(torch.bfloat16).to(parts.dtype))
    assert torch.equal(parts.double().sum(0), values.double())


def test_no_tokens() -> None:
    with use_backend("triton"):
        nearest = assign(torch.empty(0, 16, device=DEVICE), unit_rows(30, 16), euclidean=False)
    assert nearest.shape == (0, 1)


def test_the_operator_is_registered_completely() -> None:
    arguments = (torch.randn(5, 16, device=DEVICE), unit_rows(6, 16), True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(nearest_codeword, arguments, test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("euclidean", [False, True])
@pytest.mark.parametrize(
    ("tokens", "codewords", "dim"),
    [(5000, 1024, 256), (3333, 999, 100), (1, 1024, 4096), (257, 77, 1111), (64, 2000, 64)],
)
def test_large_odd_shapes(
    dtype: torch.dtype, euclidean: bool, tokens: int, codewords: int, dim: int
) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=dtype)
    check(hidden, unit_rows(codewords, dim), euclidean)
