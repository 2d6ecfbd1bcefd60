"""Where cells and their tiles begin, and sums by entry and by expert.

The layout of sorted rows is made in three small kernels:

    offsets   first row of each cell      one binary search per cell in the sorted cell ids
    starts    first tile of each cell     a cumulative sum
    tiles     cell and rows of each tile  one binary search per tile in the starts

A cell has any number of rows, so how many tiles of rows there are is known on the device only.
Their list has room for the most there can be, and what is left over is marked: nothing is read by
the host.

A decoding step has few rows and waits for every kernel: a single one sorts them and does all this.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.backend import operator
from airmoe.kernels.cells import FEW_ROWS, CellLayout, ReverseIndex, RowTiles, empty_layout
from airmoe.kernels.device_triton import block_size, count_below, load_rows

MOST_PROGRAMS = 65_535  # of a grid's second and third direction
SMALLEST, LARGEST = 32, 64  # smaller tiles read the pools too often, larger ones spill registers
SEARCH_BLOCK = 32  # one warp: searches wait for memory, so they are spread over the device
SUM_BLOCK = 1024
TILE_BLOCK = 16
FEW_BLOCK = 128  # cells that one program compares with a few rows
ENTRY_BLOCK = 1024
COUNT_ELEMENTS = 8192  # gates [rows, positions] of one program
EXPERTS, LANES = 8, 32

# Lengths change from batch to batch: none of them is worth a compilation of its own.
LENGTHS = ["num_rows", "num_cells", "num_tiles", "steps"]


@triton.jit(do_not_specialize=LENGTHS)
def _offsets_kernel(ordered, offsets, num_rows, num_cells, steps, BLOCK: tl.constexpr):
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_rows = count_below(ordered, num_rows, cells, steps)
    tl.store(offsets + cells, first_rows.to(tl.int64), mask=cells <= num_cells)


@triton.jit
def _tiles_of(cells, offsets, num_cells, ROWS: tl.constexpr):
    """How many tiles each of these cells has, 0 past the last cell."""
    real = cells < num_cells
    first = tl.load(offsets + cells, mask=real, other=0)
    end = tl.load(offsets + cells + 1, mask=real, other=0)
    return ((end - first).to(tl.int32) + ROWS - 1) // ROWS


@triton.jit(do_not_specialize=LENGTHS)
def _starts_kernel(offsets, starts, num_cells, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    own = tl.program_id(0) * BLOCK
    lanes = tl.arange(0, BLOCK)
    # Each program adds up what lies before its cells: cheaper than to wait for the one before it.
    before = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, own, BLOCK):
        before += _tiles_of(block + lanes, offsets, num_cells, ROWS)
    ends = tl.sum(before, axis=0) + tl.cumsum(_tiles_of(own + lanes, offsets, num_cells, ROWS))
    tl.store(starts + 1 + own + lanes, ends.to(tl.int64), mask=own + lanes < num_cells)
    if own == 0:
        tl.store(starts, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=LENGTHS)
def _tiles_kernel(
    offsets, starts, tile_cells, tile_first, tile_rows, num_tiles, num_cells, steps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tiles < num_tiles
    cells = count_below(starts + 1, num_cells, tiles + 1, steps)  # cells that end before the tile
    used = cells < num_cells
    own = tl.minimum(cells, num_cells - 1)
    first = (tl.load(offsets + own) + (tiles - tl.load(starts + own)) * ROWS).to(tl.int32)
    end = tl.load(offsets + own + 1).to(tl.int32)
    tl.store(tile_cells + tiles, tl.where(used, cells, -1), mask=mask)
    tl.store(tile_first + tiles, first, mask=mask)
    lanes = tl.arange(0, ROWS)
    rows = first[:, None] + lanes[None, :]
    rows = tl.where(used[:, None] & (rows < end[:, None]), rows, -1)
    places = tiles.to(tl.int64)[:, None] * ROWS + lanes[None, :]
    tl.store(tile_rows + places, rows, mask=mask[:, None])


def cell_offsets(ordered: Tensor, num_cells: int) -> Tensor:
    """Sorted cell ids [N] -> the first row of each cell: [G + 1] int64."""
    ordered, num_rows = ordered.contiguous(), ordered.shape[0]
    offsets = torch.empty(num_cells + 1, dtype=torch.int64, device=ordered.device)
    _offsets_kernel[(triton.cdiv(num_cells + 1, SEARCH_BLOCK),)](
        ordered, offsets, num_rows, num_cells, num_rows.bit_length(),
        BLOCK=SEARCH_BLOCK, num_warps=1,
    )  # fmt: skip
    return offsets


def row_tiles(offsets: Tensor, num_rows: int, block: int | None = None) -> RowTiles:
    """offsets [G + 1] of rows sorted by cell -> tiles, of a size that suits the mean cell.

    Where `block` is given, a power of two, tiles have that size.
    """
    num_cells = offsets.shape[0] - 1
    block = block_rows(num_rows, num_cells) if block is None else block
    _check_sizes(num_rows, num_cells, block)
    return RowTiles(*find_tiles_op(offsets, num_rows, block))


def _check_sizes(num_rows: int, num_cells: int, block: int) -> None:
    num_tiles = most_tiles(num_rows, num_cells, block)
    for name, size, programs in (("rows", num_rows, num_tiles), ("cells", num_cells, num_cells)):
        if programs > MOST_PROGRAMS:
            rule = f"makes {programs} blocks, and a GPU takes at most {MOST_PROGRAMS} in one"
            raise ConfigError(
                f"cells.{name}",
                size,
                f"{rule} direction",
                "Use smaller micro-batches or fewer codewords, or AIRMOE_BACKEND=reference.",
            )


def block_rows(num_rows: int, num_cells: int) -> int:
    """The power of two next above the mean cell, within what the kernels take.

    By comparisons, so that a compiler with unknown sizes tells three cases apart, not every number.
    """
    block = SMALLEST
    while block < LARGEST and num_rows >= (block + 1) * num_cells:
        block *= 2
    return block


def most_tiles(num_rows: int, num_cells: int, block: int) -> int:
    """Full tiles, and one that is not full in every cell that has rows."""
    return num_rows // block + min(num_rows, num_cells)


def empty_tiles(offsets: Tensor, num_rows: int, block: int) -> tuple[Tensor, ...]:
    num_tiles = most_tiles(num_rows, offsets.shape[0] - 1, block)
    cells, first_rows, rows = (
        torch.empty(shape, dtype=torch.int32, device=offsets.device)
        for shape in ((num_tiles,), (num_tiles,), (num_tiles, block))
    )
    return cells, first_rows, rows, torch.empty_like(offsets)


find_tiles_op = operator(
    "find_tiles(Tensor offsets, SymInt num_rows, SymInt block) -> (Tensor, Tensor, Tensor, Tensor)",
    "cells_triton",
    fake=empty_tiles,
)


def find_tiles(offsets: Tensor, num_rows: int, block: int) -> tuple[Tensor, ...]:
    """The parts of `RowTiles`."""
    offsets, num_cells = offsets.contiguous(), offsets.shape[0] - 1
    cells, first_rows, rows, starts = empty_tiles(offsets, num_rows, block)
    _starts_kernel[(triton.cdiv(num_cells, SUM_BLOCK),)](
        offsets, starts, num_cells, ROWS=block, BLOCK=SUM_BLOCK, num_warps=8
    )
    num_tiles = cells.shape[0]
    _tiles_kernel[(triton.cdiv(num_tiles, TILE_BLOCK),)](
        offsets, starts, cells, first_rows, rows, num_tiles, num_cells, num_cells.bit_length(),
        ROWS=block, BLOCK=TILE_BLOCK, num_warps=4,
    )  # fmt: skip
    return cells, first_rows, rows, starts


@triton.jit(do_not_specialize=LENGTHS)
def _few_kernel(
    ids, row_cells, order, offsets, tile_cells, tile_first, tile_rows, starts,
    num_rows, num_cells, num_tiles,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK_N)
    real = place < num_rows
    cell = tl.load(ids + place, mask=real, other=num_cells).to(tl.int32)
    before = cell[:, None] < cell[None, :]  # [others, own]: who is in a cell before one's own
    equal = cell[:, None] == cell[None, :]
    first = tl.sum(before.to(tl.int32), axis=0)
    before |= equal & (place[:, None] < place[None, :])
    row = tl.sum(before.to(tl.int32), axis=0)
    opens = real & ((row - first) % ROWS == 0)  # rows with which a tile begins
    cells = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = cells <= num_cells
    below = real[:, None] & (cell[:, None] < cells[None, :])
    tl.store(offsets + cells, tl.sum(below.to(tl.int32), axis=0).to(tl.int64), mask=inside)
    below &= opens[:, None]
    tl.store(starts + cells, tl.sum(below.to(tl.int32), axis=0).to(tl.int64), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(row_cells + row, cell.to(row_cells.dtype.element_ty), mask=real)
        tl.store(order + row, place.to(tl.int64), mask=real)
        tile = tl.sum((before & opens[:, None]).to(tl.int32), axis=0)
        end = first + tl.sum(equal.to(tl.int32), axis=0)
        lanes = tl.arange(0, ROWS)
        rows = row[:, None] + lanes[None, :]
        rows = tl.where(rows < end[:, None], rows, -1)
        tl.store(tile_cells + tile, cell, mask=opens)
        tl.store(tile_first + tile, row, mask=opens)
        tl.store(tile_rows + tile[:, None] * ROWS + lanes[None, :], rows, mask=opens[:, None])
        tile = tl.sum(opens.to(tl.int32), axis=0) + tl.arange(0, BLOCK_TILES)
        unused = tile < num_tiles
        none = tl.full((BLOCK_TILES, ROWS), -1, tl.int32)
        tl.store(tile_cells + tile, -1, mask=unused)
        tl.store(tile_first + tile, 0, mask=unused)
        tl.store(tile_rows + tile[:, None] * ROWS + lanes[None, :], none, mask=unused[:, None])


def layout_of_few(cell_ids: Tensor, num_cells: int) -> tuple[Tensor, ...]:
    """See `cells.layout_of_few`."""
    ids, num_rows = cell_ids.contiguous(), cell_ids.shape[0]
    block = block_rows(num_rows, num_cells)
    _check_sizes(num_rows, num_cells, block)
    found = empty_layout(ids, num_cells)
    num_tiles = found[3].shape[0]
    _few_kernel[(triton.cdiv(num_cells + 1, FEW_BLOCK),)](
        ids, *found, num_rows, num_cells, num_tiles,
        ROWS=block, BLOCK_N=block_size(num_rows, FEW_ROWS), BLOCK_G=FEW_BLOCK,
        BLOCK_TILES=triton.next_power_of_2(num_tiles), num_warps=4,
    )  # fmt: skip
    return found


@triton.jit
def _sum_kernel(values, entries, starts, out, num_experts, WIDE: tl.constexpr,
                EXPERTS: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    mask = experts < num_experts
    begin = tl.load(starts + experts, mask=mask, other=0)
    end = tl.load(starts + experts + 1, mask=mask, other=0)
    total = tl.zeros((EXPERTS, LANES), WIDE)
    for start in range(0, tl.max(end - begin, axis=0), LANES):
        places = (begin + start)[:, None] + tl.arange(0, LANES)[None, :]
        own = places < end[:, None]
        entry = tl.load(entries + places, mask=own, other=0)
        total += tl.load(values + entry, mask=own, other=0).to(WIDE)
    tl.store(out + experts, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=mask)


def sum_by_expert(values: Tensor, entries: Tensor, starts: Tensor) -> Tensor:
    """[G, M] -> [E], by one gather per entry, in a fixed order."""
    num_experts = starts.shape[0] - 1
    out = torch.empty(num_experts, dtype=values.dtype, device=values.device)
    _sum_kernel[(triton.cdiv(num_experts, EXPERTS),)](
        values.contiguous(), entries, starts, out, num_experts,
        WIDE=tl.float64 if values.is_floating_point() else tl.int64,
        EXPERTS=EXPERTS, LANES=LANES, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _counts_kernel(
    gates, tile_cells, tile_rows, out,
    POOL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        rows = tl.load(tile_rows + tile * BLOCK_T + tl.arange(0, BLOCK_T))
        places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        chosen = load_rows(gates, rows, rows >= 0, places, POOL) > 0
        counts = tl.sum(chosen.to(tl.int32), axis=0)
        # Integers: the sum does not depend on which tile of the cell comes first.
        target = out + cell.to(tl.int64) * POOL + places
        tl.atomic_add(target, counts, mask=places < POOL, sem="relaxed")


def counts_per_entry(gates: Tensor, layout: list[Tensor]) -> Tensor:
    """How many rows of each cell chose each of its experts: [G, M] int32."""
    cells = CellLayout.of(layout)
    tiles, pool = cells.tiles, cells.pool_width
    out = torch.zeros(cells.pools.shape, dtype=torch.int32, device=gates.device)
    block_p = block_size(pool, COUNT_ELEMENTS // tiles.block)
    _counts_kernel[(triton.cdiv(pool, block_p), tiles.count)](
        gates.contiguous(), tiles.cells, tiles.rows, out,
        POOL=pool, BLOCK_T=tiles.block, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _flags_kernel(entries, counts, flags, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    entry = tl.load(entries + places, mask=mask, other=0)
    count = tl.load(counts + entry, mask=mask, other=0)
    tl.store(flags + places, (count > 0).to(tl.int32), mask=mask)


@triton.jit
def _keep_kernel(entries, flags, ends, starts, kept, kept_starts, size, num_starts,
                 BLOCK: tl.constexpr):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    chosen = tl.load(flags + places, mask=mask, other=0) > 0
    entry = tl.load(entries + places, mask=mask, other=0)
    end = tl.load(ends + places, mask=mask, other=0)
    tl.store(kept + end - 1, entry, mask=mask & chosen)
    inside = places < num_starts
    start = tl.load(starts + places, mask=inside, other=0)
    before = tl.load(ends + start - 1, mask=inside & (start > 0), other=0)
    tl.store(kept_starts + places, before, mask=inside)


def used_entries(reverse: ReverseIndex, counts: Tensor) -> ReverseIndex:
    """Entries whose count [G, M] is not 0; there is room for all of them, the end is not set.

    Gradients of the others are 0. A cell of a few tokens uses only some of its pool, so a third of
    all partial sums of a trained model would be written, read and added for nothing.
    """
    size, num_starts = reverse.entries.shape[0], reverse.starts.shape[0]
    flags = torch.empty_like(reverse.entries)
    grid = (triton.cdiv(size, ENTRY_BLOCK),)
    _flags_kernel[grid](reverse.entries, counts, flags, size, BLOCK=ENTRY_BLOCK, num_warps=4)
    ends = flags.cumsum(0, dtype=torch.int32)
    kept, starts = torch.empty_like(reverse.entries), torch.empty_like(reverse.starts)
    grid = (triton.cdiv(max(size, num_starts), ENTRY_BLOCK),)
    _keep_kernel[grid](
        reverse.entries, flags, ends, reverse.starts, kept, starts, size, num_starts,
        BLOCK=ENTRY_BLOCK, num_warps=4,
    )  # fmt: skip
    return ReverseIndex(kept, starts)
