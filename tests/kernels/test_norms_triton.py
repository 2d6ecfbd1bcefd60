"""1/|w| of rows on Triton, as close to float64 as PyTorch's, and which rows are finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import Backend, use_backend
from airmoe.kernels.norms import counted_rows, inverse_norms
from tests.kernels.comparison import DEVICE, dtypes

pytest.importorskip("triton")

FLOOR = 2 * torch.finfo(torch.float32).eps  # relative: a lucky sum of PyTorch's may round less


def check(table: Tensor) -> None:
    """Relative errors, row by row: norms may differ by many orders of magnitude."""
    with use_backend("triton"):
        found = inverse_norms(table)
    with use_backend("reference"):
        plain, exact = inverse_norms(table), inverse_norms(table.double())
    assert found.shape == (table.shape[0],) and found.dtype == plain.dtype == torch.float32
    assert exact.dtype == torch.float64
    zero = exact == 0
    assert (found[zero] == 0).all()
    error, plain_error = (
        ((norms.double() - exact) / exact)[~zero].abs().max().item() for norms in (found, plain)
    )
    assert error <= 2 * plain_error + FLOOR, f"error {error:.3e}, PyTorch's {plain_error:.3e}"


def some_rows(rows: int, dim: int) -> Tensor:
    """Norms from small to large, and rows of zeros: the first, the last and one between."""
    table = (
        torch.randn(rows, dim, device=DEVICE) * torch.logspace(-2, 2, rows, device=DEVICE)[:, None]
    )
    table[[0, rows // 2, -1]] = 0
    return table


@dtypes
@pytest.mark.parametrize(
    ("rows", "dim"),
    [(5, 1), (700, 7), (200, 64), (70, 65), (65, 100), (33, 256), (40, 257), (9, 1000), (5, 4095)],
)
def test_norms_equal_the_reference(rows: int, dim: int, dtype: torch.dtype) -> None:
    check(some_rows(rows, dim).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e-17),
        (torch.float32, 1e-10),
        (torch.float32, 1e10),
        (torch.float32, 1e16),
        (torch.float16, 2.0**-24),  # the least there is
        (torch.float16, 1e-4),
        (torch.float16, 6e4),  # the squares of the products' own dtype would overflow
    ],
)
@pytest.mark.parametrize("dim", [64, 333, 4096])
def test_tiny_and_huge_values(dtype: torch.dtype, scale: float, dim: int) -> None:
    directions = torch.randn(6, dim, device=DEVICE).clamp(-1, 1)
    table = (directions * scale).to(dtype)
    table[4, 1:] = 0
    table[4, 0] = scale
    assert table.isfinite().all() and (table.abs().amax(-1) > 0).all()
    check(table)


def test_values_of_the_formula() -> None:
    table = torch.zeros(4, 70, device=DEVICE)
    table[0, :2] = torch.tensor([3.0, 4.0])
    table[1, 69] = -0.5
    table[3] = 2
    for backend in ("triton", "reference"):
        with use_backend(backend):
            norms = inverse_norms(table)
        expected = torch.tensor([0.2, 2.0, 0.0, 0.5 * 70**-0.5], device=DEVICE)
        torch.testing.assert_close(norms, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_no_other(spoiled: float) -> None:
    table = some_rows(50, 33)
    with use_backend("triton"):
        wanted = inverse_norms(table)
        table[7, 5] = spoiled
        found = inverse_norms(table)
    with use_backend("reference"):
        assert (inverse_norms(table)[7] > 0) == (found[7] > 0)
    others = torch.arange(50, device=DEVICE) != 7
    assert torch.equal(found[others], wanted[others])


@dtypes
@pytest.mark.parametrize("shape", [(70, 24), (1, 8), (5, 1500), (0, 8), (1500, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_counted_rows(shape: tuple[int, int], masked: bool, dtype: torch.dtype) -> None:
    hidden = torch.randn(shape, device=DEVICE).to(dtype)
    for place, bad in enumerate((torch.nan, torch.inf, -torch.inf, 3e19)):
        if shape[0] > place + 1 and bad == bad and torch.tensor(bad).to(dtype).item() == bad:
            hidden[place, -1] = bad
    if shape[0] > 4:
        hidden[4, 0] = torch.nan
    mask = torch.rand(shape[0], device=DEVICE) < 0.7 if masked else None
    grads = torch.randn(shape, device=DEVICE).to(dtype)

    def run(backend: Backend) -> list[Tensor]:
        leaf = hidden.clone().requires_grad_()
        with use_backend(backend):
            rows, valid = counted_rows(leaf, mask)
        return [rows, valid, *torch.autograd.grad(rows, leaf, grads)]

    found, wanted = run("triton"), run("reference")
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert shape[0] <= 4 or not found[1][4]
    assert mask is None or not (found[1] & ~mask).any()


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(
    ("rows", "dim"), [(100_003, 64), (5000, 1000), (3001, 1024), (777, 4095), (2_200_000, 1024)]
)
def test_large_tables_without_a_copy(rows: int, dim: int, dtype: torch.dtype) -> None:
    """The last one has more elements than a 32-bit number counts."""
    table = torch.randn(rows, dim, device=DEVICE, dtype=dtype)
    table[rows // 2] = 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norms = inverse_norms(table)
    assert torch.cuda.max_memory_allocated() - before <= 4 * rows + (2 << 20)  # rounded up
    some = torch.cat([torch.arange(100), torch.arange(rows - 100, rows)]).to(DEVICE)
    check(table[some])
    assert torch.equal(norms[some], inverse_norms(table[some]))
    assert norms[rows // 2] == 0
