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


@triton.jit
def _parts_kernel(logs, cosines, SIZE: tl.constexpr):
    number = tl.arange(0, SIZE)
    tl.store(logs + number, noise_kernels.log_of_share(number))
    tl.store(cosines + number, noise_kernels.cosine_of_turn(number))


def any_int32(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, device=DEVICE).to(torch.int32)


def test_the_integer_part_is_equal_to_the_bit() -> None:
    bits = any_int32(COLUMNS)
    bits[:6] = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31), 0x7FFF], device=DEVICE)
    out = torch.empty_like(bits)
    _mix_kernel[(1,)](bits, out, COLUMNS=COLUMNS)
    assert torch.equal(out, _mix32_(bits.clone()))


def test_logarithm_and_cosine_of_every_16_bit_number() -> None:
    logs, cosines = torch.empty(2, 1 << 16, device=DEVICE)
    _parts_kernel[(1,)](logs, cosines, SIZE=1 << 16)
    number = torch.arange(1 << 16, device=DEVICE).double()
    exact = ((number + 0.5) / 65536).log()
    eps = torch.finfo(torch.float32).eps
    assert ((logs.double() - exact) / exact).abs().max() <= 2 * eps
    assert (cosines.double() - (number * math.pi / 32768).cos()).abs().max() <= 2 * eps


@pytest.mark.parametrize("rows", [64, pytest.param(8192, marks=pytest.mark.gpu)])
def test_normal_is_within_roundings_of_the_reference(rows: int) -> None:
    row_keys = any_int32(rows)
    columns = torch.randint(0, 1 << 20, (COLUMNS,), device=DEVICE)
    columns[:3] = torch.tensor([0, 1, 2**31 - 1], device=DEVICE)
    expected = normal(row_keys.unsqueeze(-1), columns)
    actual = noise_kernels.noise_rows(row_keys, columns, 1.0)
    # A radius of at most 4.9 times a cosine whose reference angle, up to 2 pi, is rounded.
    bound = 4.9 * (2 * math.pi + 1) * torch.finfo(torch.float32).eps
    assert (actual - expected).abs().max() <= bound
    assert (actual - expected).abs().mean() <= bound / 20
    assert abs(actual.mean().item()) < 5 / math.sqrt(actual.numel())
    assert abs(actual.std().item() - 1) < 5 / math.sqrt(actual.numel())


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
            torch.testing.assert_close(found, draw(), rtol=0, atol=1e-6)
