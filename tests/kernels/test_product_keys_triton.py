"""PEER's search on Triton against its definition, and the definition against all pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.product_keys import best_pairs, num_rank_pairs, rank_pairs
from airmoe.kernels.top_k import top_positions
from tests.kernels.comparison import DEVICE

pytest.importorskip("triton")
from airmoe.kernels import product_keys_triton as kernels

INF = float("inf")


def halves(tokens: int, heads: int, side: int) -> tuple[Tensor, Tensor]:
    """As the router has them: views of one tensor."""
    first, second = torch.randn(tokens, heads, 2, side, device=DEVICE).unbind(2)
    return first, second


def on_triton(first: Tensor, second: Tensor, count: int) -> Tensor:
    with use_backend("triton"):
        return best_pairs(first, second, count)


def reference_pairs(first: Tensor, second: Tensor, count: int) -> Tensor:
    with use_backend("reference"):
        return best_pairs(first, second, count)


def check(first: Tensor, second: Tensor, count: int) -> None:
    actual = on_triton(first, second, count)
    assert actual.dtype == torch.int64
    assert torch.equal(actual, reference_pairs(first, second, count))


def all_pairs(first: Tensor, second: Tensor, count: int) -> Tensor:
    return top_positions((first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2), count)


@pytest.mark.parametrize(("side", "count"), [(1, 1), (3, 9), (7, 5), (20, 64), (6, 35), (64, 16)])
def test_rank_pairs_are_those_that_can_be_among_the_best(side: int, count: int) -> None:
    depth = min(side, count)
    wanted = [(r, s) for r in range(depth) for s in range(depth) if (r + 1) * (s + 1) <= count]
    first, second = rank_pairs(side, count, torch.device("cpu"))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == wanted
    assert num_rank_pairs(side, count) == len(wanted)


@pytest.mark.parametrize(("side", "count"), [(1, 1), (2, 3), (5, 25), (9, 4), (30, 7), (16, 60)])
def test_the_definition_is_the_best_of_all_pairs(side: int, count: int) -> None:
    """Ties included, as long as sums are exact: then no pair outside the ranks can tie."""
    for levels in (1, 3, 1000):
        first, second = (torch.randint(levels, (4, 3, side)) / 8 for _ in range(2))
        first[0], second[1] = -first[0], -second[1]
        assert torch.equal(reference_pairs(first, second, count), all_pairs(first, second, count))


@pytest.mark.parametrize(
    ("tokens", "heads", "side", "count"),
    [
        (1, 1, 1, 1),
        (3, 1, 33, 1),
        (1, 3, 40, 7),
        (2, 2, 5, 12),  # more than one half holds
        (3, 2, 3, 9),  # all pairs
        (2, 1, 64, 16),
        (1, 2, 45, 17),
        (1, 1, 256, 64),
    ],
)
def test_best_first(tokens: int, heads: int, side: int, count: int) -> None:
    check(*halves(tokens, heads, side), count)


@pytest.mark.parametrize(("side", "count"), [(20, 3), (40, 17), (6, 20)])
def test_ties_go_to_the_lowest_id(side: int, count: int) -> None:
    first, second = (torch.randint(-1, 2, (5, 1, side), device=DEVICE) / 2 for _ in range(2))
    first[0], second[0] = 0.0, 0.0
    first[1], second[1] = -0.0, -0.0
    first[2, :, ::2], first[2, :, 1::2] = -0.0, 0.0
    second[3] = torch.randn(side, device=DEVICE)
    check(first, second, count)
    exact = [0, 1, 2, 4]  # where no sum is rounded, the definition is the best of all pairs
    expected = all_pairs(first[exact], second[exact], count)
    assert torch.equal(reference_pairs(first[exact], second[exact], count), expected)


def test_sums_that_rounding_makes_equal_fall_as_in_the_definition() -> None:
    """The rank order of the halves and the order of the ids differ there."""
    first, second = halves(3, 1, 24)
    check(first * 1e8 + 1e9, second, 12)  # the second half is lost altogether
    check(first, second * 1e-7, 12)
    check(first * 1e-6 + 1, second * 1e-6 + 1, 12)  # a few distinct sums only


def test_infinities_and_extremes() -> None:
    first, second = halves(6, 1, 24)
    first[0, 0, 3:] = -INF
    first[1, 0], second[1, 0, 1:] = -INF, -INF
    first[2], second[2] = first[2] * 1e-42, second[2] * 1e-42  # not normal
    first[3], second[3] = 3e38, 3e38  # sums overflow
    first[4] *= 1e38
    second[5] = -1e30
    for count in (3, 12):
        check(first, second, count)


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    first, second = halves(4, 1, 20)
    expected = on_triton(first, second, 6)
    first, second = first.clone(), second.clone()
    first[0, 0, 4], second[2, 0], first[2, 0, 5] = torch.nan, torch.nan, INF
    actual = on_triton(first, second, 6)
    assert torch.equal(actual[1::2], expected[1::2])
    assert ((actual >= 0) & (actual < 400)).all()
    assert all(len(set(row)) == 6 for row in actual.flatten(0, 1).tolist())


def test_programs_that_take_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_PROGRAMS", 3)
    check(*halves(4, 1, 20), 5)
    check(*halves(5, 1, 4), 6)  # halves that are sorted whole


def test_scores_in_any_layout() -> None:
    first, second = halves(2, 2, 24)
    transposed = torch.randn(24, 2, 2, device=DEVICE).permute(2, 1, 0)
    check(first.contiguous(), transposed, 5)
    check(transposed, second, 5)
    check(first[:, :1], second[:, :1], 5)


def test_what_does_not_fit_into_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "best_pairs", None)  # calling it would raise
    check(*halves(2, 1, 40), 1000)
    check(*halves(1, 1, 5000), 3)


def test_no_gradient() -> None:
    first, second = halves(1, 1, 20)
    assert not on_triton(first.requires_grad_(), second, 3).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "heads", "side", "count"),
    [
        (4096, 8, 256, 64),
        (333, 8, 100, 50),
        (777, 1, 1024, 64),
        (50, 3, 1000, 100),
        (99, 2, 2048, 64),
        (33, 2, 4096, 20),
        (500, 4, 256, 128),
        (64, 8, 256, 180),
        (70, 2, 30, 900),
        (999, 8, 512, 1),
        (1, 8, 1024, 64),
    ],
)
def test_large_odd_shapes(tokens: int, heads: int, side: int, count: int) -> None:
    first, second = halves(tokens, heads, side)
    check(first, second, count)
    check(first.bfloat16().float(), second.half().float(), count)  # many ties
    check(first.round(), second.round(), count)
