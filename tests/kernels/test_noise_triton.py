"""The kernels' jitter is the reference's jitter."""

# ruff: noqa: N803 (compile-time constants of kernels are in capitals)
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.noise import Stage, _mix32_, combine, make_noise, normal
from tests.kernels.comparison import DEVICE

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from airmoe.kernels import noise_triton as noise_kernels  # noqa: E402

COLUMNS = 128


@triton.jit
def _mix_kernel(bits, out, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(out + column, noise_kernels.mix32(tl.load(bits + column)))


def any_int32(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, device=DEVICE).to(torch.int32)


def test_the_integer_part_is_equal_to_the_bit() -> None:
    bits = any_int32(COLUMNS)
    bits[:6] = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31), 0x7FFF], device=DEVICE)
    out = torch.empty_like(bits)
    _mix_kernel[(1,)](bits, out, COLUMNS=COLUMNS)
    assert torch.equal(out, _mix32_(bits.clone()))


@pytest.mark.parametrize("rows", [64, pytest.param(8192, marks=pytest.mark.gpu)])
def test_normal_is_that_of_the_reference(rows: int) -> None:
    row_keys = any_int32(rows)
    columns = torch.randint(0, 1 << 20, (COLUMNS,), device=DEVICE)
    columns[:3] = torch.tensor([0, 1, 2**31 - 1], device=DEVICE)
    expected = normal(row_keys.unsqueeze(-1), columns)
    actual = noise_kernels.noise_rows(row_keys, columns, 1.0)
    # The special function unit: 2^-20.5 for the cosine, times a radius of at most 4.9; near a
    # share of 1 the radius is small, and a small error of the logarithm weighs more.
    assert (actual - expected).abs().max() <= 1e-4
    assert (actual - expected).abs().mean() <= 2e-6


@pytest.mark.parametrize("rows", [1024, pytest.param(65536, marks=pytest.mark.gpu)])
def test_moments_and_tails_are_those_of_a_normal_distribution(rows: int) -> None:
    """Each within five standard deviations of its estimate."""
    numbers = noise_kernels.noise_rows(any_int32(rows), torch.arange(COLUMNS, device=DEVICE), 1.0)
    numbers = numbers.double()
    size = numbers.numel()
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        found = numbers.pow(power).mean().item()
        assert abs(found - mean) <= 5 * math.sqrt(variance / size), power
    for distance in (1.0, 2.0, 3.0):
        share = math.erfc(distance / math.sqrt(2))
        found = (numbers.abs() > distance).double().mean().item()
        assert abs(found - share) <= 5 * math.sqrt(share / size), distance
    assert numbers.abs().max() <= 4.86


def test_keys_are_those_of_the_reference() -> None:
    scalar = torch.tensor(2**61 + 12345, device=DEVICE)
    count = torch.tensor(77, device=DEVICE)
    rows = torch.arange(1500, device=DEVICE)
    keys = combine(scalar, count)
    for first, rest in (
        (scalar, ()),
        (scalar, (count, 3)),
        (scalar, (5, rows)),
        (keys, (2, count, rows)),
        (rows, (count,)),
    ):
        with use_backend("triton"):
            found = combine(first, *rest)
        assert torch.equal(found, combine(first, *rest))
    for dtype in (torch.int64, torch.int32):
        with use_backend("triton"):
            found = combine(keys, count, 3, rows=1500, dtype=dtype)
        assert torch.equal(found, combine(keys, count, 3, rows=1500, dtype=dtype))
        assert torch.equal(found, combine(keys, count, 3, rows).to(dtype))


def test_jitter_as_a_tensor() -> None:
    noise = make_noise(torch.tensor(9, device=DEVICE), Stage.SUBKEY, 40, 0.3)
    columns = torch.randint(70000, (300,), device=DEVICE)
    rows, names = torch.arange(40, device=DEVICE).unsqueeze(-1), columns.view(1, -1)
    for draw in (
        lambda: noise.rows(slice(None), columns),
        lambda: noise.rows(torch.tensor([3, 7], device=DEVICE), columns),
        lambda: noise.pairs(rows, names),
    ):
        with use_backend("triton"):
            found = draw()
        with use_backend("reference"):
            torch.testing.assert_close(found, draw(), rtol=0, atol=0.3 * 1e-4)  # as above
