"""What the codebook learns from, in Triton: sums by codeword, and tokens that can be counted."""

from __future__ import annotations

import pytest
import torch

from airmoe.kernels.backend import use_backend
from airmoe.kernels.codeword_sums import codeword_sums, directions
from airmoe.kernels.noise import Stage, combine, make_noise
from airmoe.kernels.norms import finite_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


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
@pytest.mark.parametrize("shape", [(70, 24), (1, 8), (5, 1500), (0, 8)])
def test_finite_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    hidden = torch.randn(shape, device=DEVICE).to(dtype)
    for place, bad in enumerate((torch.nan, torch.inf, -torch.inf, 3e19)):
        if shape[0] > place + 1 and bad == bad and torch.tensor(bad).to(dtype).item() == bad:
            hidden[place, -1] = bad
    if shape[0] > 4:
        hidden[4, 0] = torch.nan
    with use_backend("triton"):
        found = finite_rows(hidden)
    assert torch.equal(found, finite_rows(hidden))
    assert shape[0] <= 4 or not found[4]


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
