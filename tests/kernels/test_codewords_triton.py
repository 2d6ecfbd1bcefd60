"""Codewords on Triton: the nearest of each token up to ties within rounding, and their sums."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.codewords import (
    assign,
    codeword_sums,
    directions,
    drawn_tokens,
    move,
)
from tests.kernels.comparison import DEVICE, DTYPES, unit_rows
from tests.tolerance import score_slack

pytest.importorskip("triton")
from airmoe.kernels import codewords_triton
from airmoe.kernels.device_triton import bfloat16_parts


@pytest.fixture(params=["small batch", "large batch"])
def _both_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of either size of batch, whatever the number of tokens."""
    small = request.param == "small batch"
    monkeypatch.setattr(codewords_triton, "SMALL_BATCH", 64 if small else 0)
    # So that programs take most words where there are hundreds, and fewest where there are less.
    monkeypatch.setattr(codewords_triton, "ENOUGH_PROGRAMS", 16)


def similarity(hidden: Tensor, codewords: Tensor, euclidean: bool) -> Tensor:
    products = hidden.to(codewords.dtype) @ codewords.T
    return products - codewords.square().sum(-1) / 2 if euclidean else products


def assert_nearest(nearest: Tensor, hidden: Tensor, codewords: Tensor, euclidean: bool) -> None:
    assert nearest.shape == hidden.shape[:1] and nearest.dtype == torch.int64
    exact = similarity(hidden, codewords.double(), euclidean)
    plain = similarity(hidden, codewords, euclidean)
    slack = score_slack(exact, plain)
    chosen = exact.gather(-1, nearest.unsqueeze(-1)).squeeze(-1)
    # So it is exactly the one of float64, where its lead is more than rounding.
    assert (chosen >= exact.amax(-1) - slack).all()


def check(hidden: Tensor, codewords: Tensor, euclidean: bool) -> None:
    with use_backend("triton"):
        nearest = assign(hidden, codewords, euclidean=euclidean)
    assert_nearest(nearest, hidden, codewords, euclidean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("euclidean", [False, True])
@pytest.mark.parametrize(
    ("tokens", "codewords", "dim"),
    [
        (1, 1, 1),
        (7, 5, 20),
        (150, 130, 33),
        (40, 300, 64),
        (1, 300, 257),
        (8, 77, 1000),
        (17, 130, 31),
        (64, 63, 515),
    ],
)
@pytest.mark.usefixtures("_both_sizes")
def test_the_nearest(
    dtype: torch.dtype, euclidean: bool, tokens: int, codewords: int, dim: int
) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=dtype)
    check(hidden, unit_rows(codewords, dim) * (1.5 if euclidean else 1), euclidean)


@hypothesis.given(
    tokens=st.integers(1, 64),
    codewords=st.integers(1, 70),
    dim=st.integers(1, 40),
    euclidean=st.booleans(),
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=60)
def test_small_whole_numbers_are_exact(
    tokens: int, codewords: int, dim: int, euclidean: bool, seed: int
) -> None:
    """Nothing is rounded, and with so few values ties are everywhere."""
    drawn = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (tokens, dim), generator=drawn).float().to(DEVICE)
    words = torch.randint(-1, 2, (codewords, dim), generator=drawn).float().to(DEVICE)
    with use_backend("triton"):
        nearest = assign(hidden, words, euclidean=euclidean)
    scores = similarity(hidden.double(), words.double(), euclidean)
    ids = torch.arange(codewords, device=DEVICE)
    wanted = ids.where(scores == scores.amax(-1, keepdim=True), codewords).amin(-1)
    assert torch.equal(nearest, wanted)


@pytest.mark.parametrize("euclidean", [False, True])
def test_candidates_are_compared_block_by_block(
    euclidean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal candidates in one block, and in one place of two blocks, and in another place."""
    monkeypatch.setattr(codewords_triton, "COMPARE_BLOCK", 4)
    words = torch.eye(200, 16, device=DEVICE) * 0
    hidden = torch.eye(16, device=DEVICE)[:5]
    for column, ids in enumerate([(9, 18), (10, 42, 107), (70, 8 * 12 + 1), (33, 34)]):
        words[list(ids), column] = 1
    with use_backend("triton"):
        nearest = assign(hidden, words, euclidean=euclidean)
    assert nearest.tolist() == [9, 10, 70, 33, 0]


@pytest.mark.usefixtures("_both_sizes")
def test_ids_are_in_range_whatever_the_numbers() -> None:
    hidden = torch.randn(6, 20, device=DEVICE)
    words = unit_rows(50, 20)
    with use_backend("triton"):
        wanted = assign(hidden, words, euclidean=False)
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled = hidden.clone()
            spoiled[2, 3] = value
            nearest = assign(spoiled, words, euclidean=False)
            others = torch.arange(6, device=DEVICE) != 2
            assert torch.equal(nearest[others], wanted[others])
            assert ((nearest >= 0) & (nearest < 50)).all()
        # All squared norms are infinite, so that no codeword is nearer than another.
        assert (assign(hidden, words * 1e30, euclidean=True) == 0).all()


def test_a_codeword_that_is_no_number_hides_no_other() -> None:
    hidden, words = torch.randn(9, 20, device=DEVICE), unit_rows(50, 20)
    words[[3, 17, 49]] = torch.nan
    with use_backend("triton"):
        nearest = assign(hidden, words, euclidean=False)
    wanted = (hidden @ words.T).nan_to_num(nan=-torch.inf).argmax(-1)
    assert torch.equal(nearest, wanted)


@pytest.mark.usefixtures("_both_sizes")
def test_ties_go_to_the_lowest_id() -> None:
    codewords = unit_rows(200, 16)
    codewords[150] = codewords[140] = codewords[3]
    hidden = codewords[[150, 140, 3, 7]].clone()
    hidden[3] = 0  # nearest to all alike
    with use_backend("triton"):
        nearest = assign(hidden, codewords, euclidean=False)
    assert nearest.tolist() == [3, 3, 3, 0]


def test_three_parts_add_up_to_the_number() -> None:
    values = torch.randn(40, 30, device=DEVICE) * 2.0 ** torch.randint(-60, 60, (40, 30)).to(DEVICE)
    parts = bfloat16_parts(values)
    assert torch.equal(parts, parts.to(torch.bfloat16).to(parts.dtype))
    assert torch.equal(parts.double().sum(0), values.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spherical", [True, False])
@pytest.mark.parametrize(("tokens", "dim", "codes"), [(200, 24, 7), (1, 16, 3), (150, 96, 1)])
def test_sums(dtype: torch.dtype, spherical: bool, tokens: int, dim: int, codes: int) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE).to(dtype)
    valid = torch.rand(tokens, device=DEVICE) > 0.2
    hidden = hidden.masked_fill(~valid.unsqueeze(-1), 0)
    ids = torch.randint(max(1, codes - 1), (tokens,), device=DEVICE)  # the last codeword is empty
    with use_backend("triton"):
        found = codeword_sums(hidden, valid, ids, codes, spherical=spherical)
        again = codeword_sums(hidden, valid, ids, codes, spherical=spherical)
    states = directions(hidden.double()) if spherical else hidden.double()
    exact = torch.zeros(codes, dim + 1, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, ids, torch.cat([states, valid.double().unsqueeze(-1)], -1))
    plain = codeword_sums(hidden, valid, ids, codes, spherical=spherical)
    bound = 2 * (plain - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (found - exact).abs().max() <= bound
    assert torch.equal(found[:, -1].double(), exact[:, -1])
    assert torch.equal(found, again), "a fixed order of summation"


def test_directions_of_tiny_and_huge_tokens() -> None:
    hidden = torch.tensor([[3e-30, 4e-30], [3e18, 4e18], [0.0, 0.0]], device=DEVICE)
    valid = torch.ones(3, dtype=torch.bool, device=DEVICE)
    with use_backend("triton"):
        found = codeword_sums(hidden, valid, torch.arange(3, device=DEVICE), 3, spherical=True)
    wanted = torch.tensor([[0.6, 0.8, 1], [0.6, 0.8, 1], [0, 0, 1]], device=DEVICE)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spherical", [True, False])
@pytest.mark.parametrize(("tokens", "dim"), [(60, 24), (1, 300)])
def test_drawn_tokens(dtype: torch.dtype, spherical: bool, tokens: int, dim: int) -> None:
    """Every key draws from all ranks' tokens, or from its own part; other ranks' are 0 here."""
    hidden = torch.randn(tokens, dim, device=DEVICE).to(dtype)
    valid = torch.rand(tokens, device=DEVICE) > 0.3
    hidden = hidden.masked_fill(~valid.unsqueeze(-1), 0)
    own = hidden[valid].double()
    first, total = 4, 4 + own.shape[0] + 5  # other ranks have tokens before and after
    keys = torch.randint(-(2**63), 2**63 - 1, (80,))
    for strata in (False, True):
        borders = [place * total // 80 for place in range(81)]
        wanted = torch.zeros(80, dim, dtype=torch.float64, device=DEVICE)
        for row, key in enumerate(keys.tolist()):
            low, high = (borders[row], borders[row + 1]) if strata else (0, total)
            number = low + ((key & (2**63 - 1)) >> 1) % max(high - low, 1) - first
            if 0 <= number < own.shape[0]:
                wanted[row] = own[number]
        wanted = directions(wanted) if spherical else wanted
        scalars = torch.tensor(total, device=DEVICE), torch.tensor(first, device=DEVICE)
        options = {"strata": strata, "spherical": spherical}
        for backend in ("triton", "reference"):
            with use_backend(backend):
                found = drawn_tokens(hidden, valid, keys.to(DEVICE), *scalars, **options)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("euclidean", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 7])
def test_codewords_move(euclidean: bool, num_tokens: int) -> None:
    """Living, dead and empty codewords, and no tokens at all."""
    codes, dim = 9, 40
    counts, sums = torch.rand(codes, device=DEVICE) * 4, torch.randn(codes, dim, device=DEVICE)
    totals = torch.randn(codes, 2 * dim + 1, device=DEVICE)
    totals[:, dim] = torch.tensor([0.0, 0.5, 1, 2, 3, 4, 5, 6, 7])
    counts[0], sums[3], totals[3, :dim] = 0, 0, 0
    counts[5], totals[5, dim:] = 0, 0  # replaced by a token that is 0
    before = [unit_rows(codes, dim), counts, sums]
    size = torch.tensor(num_tokens, device=DEVICE)

    def after(dtype: torch.dtype) -> list[Tensor]:
        codewords, counts, sums = (part.to(dtype, copy=True) for part in before)
        options: dict[str, Any] = {"decay": 0.75, "dead_below": 1.0, "euclidean": euclidean}
        move(codewords, counts, sums, totals.to(dtype), size, **options)
        return [codewords, counts, sums]

    with use_backend("triton"):
        found = after(torch.float32)
    exact = after(torch.float64)
    assert all(map(torch.equal, found, before)) == (num_tokens == 0)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("euclidean", [False, True])
@pytest.mark.parametrize(
    ("tokens", "codewords", "dim"),
    [
        (5000, 1024, 256),
        (3333, 999, 100),
        (1, 1024, 4096),
        (257, 77, 1111),
        (64, 2000, 64),
        (8, 1024, 1024),
        (8, 5000, 1000),
        (23, 1024, 777),
        (64, 3000, 1024),
        (64, 999, 333),
    ],
)
def test_large_odd_shapes(
    dtype: torch.dtype, euclidean: bool, tokens: int, codewords: int, dim: int
) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=dtype)
    check(hidden, unit_rows(codewords, dim), euclidean)
