"""The layout of cells on Triton: integers, so equal to the reference one by one."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.cells import Cells, RowTiles, make_cells
from tests.kernels.comparison import DEVICE

pytest.importorskip("triton")
from airmoe.kernels import cells_triton
from airmoe.kernels.cells_triton import block_rows, row_tiles

BLOCKS = [32, 64]
ON_GPU = DEVICE == "cuda"
MANY = 5000 if ON_GPU else 60  # cells: more than three blocks of the cumulative sum


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the interpreter, too, adds up several blocks."""
    if not ON_GPU:
        monkeypatch.setattr(cells_triton, "SUM_BLOCK", 16)
        monkeypatch.setattr(cells_triton, "FEW_BLOCK", 16)


def assert_equal(found: Tensor | None, wanted: Tensor | None, name: str) -> None:
    assert found is not None and wanted is not None, name
    assert found.dtype == wanted.dtype, name
    assert torch.equal(found, wanted), name


def assert_tiles(found: RowTiles, offsets: Tensor, block: int) -> None:
    """Every cell is cut into runs of `block` rows, one after the other; the rest is no tile."""
    cells, first_rows, ends, starts = [], [], [], [0]
    for cell, (begin, end) in enumerate(pairwise(offsets.tolist())):
        own = range(begin, end, block)
        cells += [cell] * len(own)
        first_rows += own
        ends += [end] * len(own)
        starts.append(len(cells))
    unused = found.count - len(cells)
    assert found.block == block and unused >= 0
    first, end = (torch.tensor(each, dtype=torch.int32).to(DEVICE) for each in (first_rows, ends))
    rows = first.unsqueeze(-1) + torch.arange(block, device=DEVICE, dtype=torch.int32)
    rows = torch.where(rows < end.unsqueeze(-1), rows, -1)
    assert found.cells.tolist() == cells + [-1] * unused
    assert_equal(found.first_rows[: len(cells)], first, "first rows")
    assert_equal(found.rows, torch.cat([rows, rows.new_full((unused, block), -1)]), "rows")
    assert_equal(found.starts, torch.tensor(starts, device=DEVICE), "starts")


def check_tiles(offsets: Tensor, num_rows: int, block: int) -> None:
    assert_tiles(row_tiles(offsets, num_rows, block), offsets, block)


def find_offsets(ordered: Tensor, num_cells: int) -> Tensor:
    return torch.searchsorted(ordered, torch.arange(num_cells + 1, device=DEVICE))


def layout(cell_ids: Tensor, num_cells: int) -> Cells:
    return make_cells(cell_ids, torch.zeros(num_cells, 1, dtype=torch.int64, device=DEVICE))


def check_cells(cell_ids: Tensor, num_cells: int) -> Cells:
    """Cells made on Triton, compared with those of the reference and with plain counting."""
    with use_backend("reference"):
        wanted = layout(cell_ids, num_cells)
    with use_backend("triton"):
        found = layout(cell_ids, num_cells)
        tiles = found.layout().tiles
    for name in ("token_ids", "offsets", "order"):
        assert_equal(getattr(found, name), getattr(wanted, name), name)
    assert_tiles(tiles, wanted.offsets, block_rows(cell_ids.numel(), num_cells))
    flat = cell_ids.flatten()
    assert torch.equal(found.offsets.diff(), flat.bincount(minlength=num_cells))
    assert_equal(found.cell_of_row, flat[found.order], "cell of each row")
    assert torch.equal(found.token_ids, found.order // cell_ids.shape[1])
    return found


def random_ids(num_tokens: int, num_cells: int, rows_per_token: int = 1) -> Tensor:
    return torch.randint(num_cells, (num_tokens, rows_per_token), device=DEVICE)


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 63, 300])
@pytest.mark.parametrize("num_cells", [1, 2, 16, 17, MANY])
def test_odd_shapes(num_tokens: int, num_cells: int) -> None:
    cells = check_cells(random_ids(num_tokens, num_cells), num_cells)
    for block in BLOCKS:
        check_tiles(cells.offsets, num_tokens, block)


@pytest.mark.parametrize("rows_per_token", [1, 2, 3])
@pytest.mark.parametrize(("num_tokens", "num_cells"), [(0, 5), (1, 5), (64, 1), (333, 70)])
def test_several_rows_per_token(num_tokens: int, num_cells: int, rows_per_token: int) -> None:
    check_cells(random_ids(num_tokens, num_cells, rows_per_token), num_cells)


def test_many_empty_cells() -> None:
    """Also whole blocks of the cumulative sum without a row, between those that have some."""
    length = cells_triton.SUM_BLOCK
    ids = torch.tensor([0, length - 1, length, MANY - 5, MANY - 4, MANY - 1], device=DEVICE)
    cells = check_cells(ids[torch.randint(6, (70, 1), device=DEVICE)], MANY)
    for block in BLOCKS:
        check_tiles(cells.offsets, 70, block)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 2, 31, 32, 33, 63, 64, 65, 130]), min_size=1),
    block=st.sampled_from(BLOCKS),
)
def test_any_sizes(sizes: list[int], block: int) -> None:
    counts = torch.tensor(sizes)
    ids = torch.arange(len(sizes)).repeat_interleave(counts)
    cells = check_cells(ids[torch.randperm(ids.numel())].unsqueeze(-1).to(DEVICE), len(sizes))
    check_tiles(cells.offsets, ids.numel(), block)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(-3, 12)), num_cells=st.integers(1, 10))
def test_offsets_of_any_ids(ids: list[int], num_cells: int) -> None:
    """Ids outside of the cells too: whoever has such rows finds them in no cell."""
    ordered = torch.tensor(ids, dtype=torch.int64, device=DEVICE).sort().values
    wanted = find_offsets(ordered, num_cells)
    assert_equal(cells_triton.cell_offsets(ordered, num_cells), wanted, "offsets")


def test_strided_operands() -> None:
    ordered = random_ids(50, 9).flatten().sort().values
    offsets = find_offsets(ordered, 9)
    assert_equal(cells_triton.cell_offsets(strided(ordered), 9), offsets, "offsets")
    check_tiles(strided(offsets), 50, 32)


def strided(values: Tensor) -> Tensor:
    """The same values with others between them in memory."""
    return torch.stack([values, -values], dim=-1)[:, 0]


def everything(cell_ids: Tensor, pools: Tensor) -> list[Tensor]:
    cells = make_cells(cell_ids, pools)
    tiles = cells.layout().tiles
    of_tiles = [getattr(tiles, field.name) for field in fields(tiles)]
    return [cells.offsets, cells.token_ids, cells.order, cells.cell_of_row, *of_tiles]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(dynamic: bool) -> None:
    import airmoe.routers.planning  # noqa: F401 (tells the compiler that the backend is a constant)

    torch._dynamo.reset()
    pools = torch.zeros(70, 3, dtype=torch.int64, device=DEVICE)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with use_backend("triton"):
        for num_tokens, rows_per_token in ((40, 1), (55, 1), (2500, 2)):
            cell_ids = random_ids(num_tokens, 70, rows_per_token)
            wanted = everything(cell_ids, pools)
            for found, expected in zip(compiled(cell_ids, pools), wanted, strict=True):
                assert_equal(found, expected, f"{num_tokens} tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [8, 16_384, 65_536, 100_001])
@pytest.mark.parametrize("num_cells", [1, 1000, 1024, 30_011])
def test_large_shapes(num_tokens: int, num_cells: int) -> None:
    for ids in (random_ids(num_tokens, num_cells), random_ids(num_tokens, 1) + num_cells // 2):
        cells = check_cells(ids, num_cells)
        for block in BLOCKS:
            check_tiles(cells.offsets, num_tokens, block)
