"""The two products over cells that gather rows of tables: X is [N, M], a row per token and cell.

    pool_products   out[token] = X[row] @ table[pool]
    table_gradients out[expert] = sum over its cells of X[rows, position].T @ values[tokens]

For the second each cell writes partial sums, and each expert gathers its own. The partial sums of
all experts would be a [G, M, D] tensor, so experts are cut into parts with about equally many
entries. A pool is sorted by expert: a part is a run of positions in it.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import gpu_bytes
from airmoe.kernels.cells import MANY_ROWS, CellLayout, ReverseIndex
from airmoe.kernels.cells_triton import used_entries
from airmoe.kernels.device_triton import (
    block_size,
    count_below,
    dot,
    load_rows,
    part_dtype,
    part_of_pool,
    rows_of_tile,
    store_rows,
)

REDUCE_PROGRAMS = 132 * 128
SHORT_LISTS = 8  # up to this mean number of entries, a program sums those of several experts
SHORT_ELEMENTS = 512  # of their gradients
# Memory for the partial sums of one part: so much, or a share of the GPU's if that is more. Where
# there are many rows, several matrices [N, M] are there at the same time.
PART_BYTES, PART_BYTES_OF_MANY_ROWS = 512 * 2**20, 256 * 2**20
PART_SHARE = 128
SCALED = (torch.bfloat16,)  # dtypes of X whose projected sums are held in float16 with scales
WIDEST_SCALED = 256  # columns of a row that a program holds whole
SMALLEST_SCALE = tl.constexpr(1e-30)
NOWHERE = tl.constexpr(-(2**30))  # a shift that leaves every position negative
SEARCH_BLOCK, SUM_BLOCK = 32, 1024


@triton.jit
def _add_product(
    x, table, rows, row_mask, places, place_mask, ids, columns, total,
    POOL: tl.constexpr, DIM: tl.constexpr, TOKENS_FIRST: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """total + X[rows, places] @ table[ids, columns], or the transpose of it."""
    x = load_rows(x, rows, row_mask, places, POOL)
    table = load_rows(table, ids, place_mask, columns, DIM)
    if TOKENS_FIRST:
        total = dot(x, table, total, False, False, PART)
    else:
        total = dot(table, x, total, True, True, PART)
    return total


@triton.jit
def _pool_products_kernel(
    x_1, table_1, x_2, table_2, out,
    tile_cells, tile_first, offsets, token_ids, pools,
    POOL: tl.constexpr, DIM: tl.constexpr, BY_TOKEN: tl.constexpr, PART: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(1)
    cell = tl.load(tile_cells + tile)
    if cell >= 0:
        rows, row_mask, _ = rows_of_tile(tile_first, offsets, token_ids, tile, cell, BLOCK_T)
        columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        tokens_first: tl.constexpr = BLOCK_T >= 64
        if tokens_first:
            total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        else:
            total = tl.zeros((BLOCK_D, BLOCK_T), tl.float32)
        for start in range(0, POOL, BLOCK_P):
            places, place_mask, ids = part_of_pool(pools, cell, start, POOL, BLOCK_P)
            total = _add_product(
                x_1, table_1, rows, row_mask, places, place_mask, ids, columns, total,
                POOL, DIM, tokens_first, PART,
            )  # fmt: skip
            if x_2 is not None:
                total = _add_product(
                    x_2, table_2, rows, row_mask, places, place_mask, ids, columns, total,
                    POOL, DIM, tokens_first, PART,
                )  # fmt: skip
        if not tokens_first:
            total = tl.trans(total)
        if BY_TOKEN:  # read at the end, to hold no registers until then
            rows = tl.load(token_ids + rows, mask=row_mask, other=0)
        store_rows(out, rows, row_mask, columns, total, DIM)


def pool_products(
    pairs: list[tuple[Tensor, Tensor]], layout: CellLayout, num_tokens: int
) -> Tensor:
    """Sum over pairs of X [N, M] @ table[pool]: [T, D] in the table's dtype.

    A token with several rows gets their sum, taken in float32.
    """
    table = pairs[0][1]
    second = pairs[1] if len(pairs) == 2 else (None, None)
    tiles, dim = layout.tiles, table.shape[1]
    by_token = layout.num_rows == num_tokens  # one row each: rows are a permutation of tokens
    dtype = table.dtype if by_token else torch.float32
    out = torch.empty(layout.num_rows, dim, dtype=dtype, device=table.device)
    if out.numel() == 0:
        return out if by_token else out.new_zeros(num_tokens, dim).to(table.dtype)
    config = _pool_config(table.dtype, dim, layout.pool_width, len(pairs))
    _pool_products_kernel[(triton.cdiv(dim, config["BLOCK_D"]), tiles.count)](
        *pairs[0], *second, out,
        tiles.cells, tiles.first_rows, layout.offsets, layout.token_ids, layout.pools,
        POOL=layout.pool_width, DIM=dim, BLOCK_T=tiles.block, BY_TOKEN=by_token,
        PART=part_dtype(), **config,
    )  # fmt: skip
    if by_token:
        return out
    rows = layout.token_ids.argsort(stable=True)  # token by token; every token has equally many
    return out.index_select(0, rows).view(num_tokens, -1, dim).sum(1).to(table.dtype)


def _pool_config(dtype: torch.dtype, dim: int, pool: int, pairs: int) -> dict[str, int]:
    wide = dtype == torch.float32
    return {
        "BLOCK_D": block_size(dim, 64 if wide else 128),
        "BLOCK_P": block_size(pool, 32 if wide or pairs == 2 else 64),
        "num_warps": 4,
        "num_stages": 1 if wide else 3,  # parts of float32 are made in registers
    }


@dataclass(frozen=True)
class Parts:
    """Ranges of experts; cells write the partial sums of a part one after another."""

    experts: Tensor  # [parts + 1] int32: first expert of each part
    positions: Tensor  # [G, parts + 1] int32: first pool position of each part
    # [G, parts] int32: row of a partial sum = its position + this, negative if there is none
    shifts: Tensor
    count: int
    rows: int  # the most partial sums of one part


@triton.jit
def _positions_kernel(
    starts, pools, experts, positions, num_experts, num_cells, total, share, expert_steps,
    POOL: tl.constexpr, POOL_STEPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Experts that occur nowhere belong to some part all the same: their gradient is 0.
    bound = tl.where(part == 0, 0, num_experts) + tl.zeros((BLOCK,), tl.int32)
    if (part > 0) & (part < PARTS):
        mark = tl.minimum(part * share, total) + tl.zeros((BLOCK,), tl.int32)
        bound = count_below(starts, num_experts + 1, mark, expert_steps)
    own = tl.minimum(cells, num_cells - 1).to(tl.int64)
    position = count_below(pools + own * POOL, POOL, bound, POOL_STEPS)
    tl.store(positions + own * (PARTS + 1) + part, position, mask=cells < num_cells)
    tl.store(experts + part + cells, bound, mask=cells == 0)


@triton.jit
def _shifts_kernel(positions, offsets, shifts, num_cells, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    before = 0
    for start in range(0, num_cells, BLOCK):
        cells = start + tl.arange(0, BLOCK)
        mask = cells < num_cells
        place = cells.to(tl.int64) * (PARTS + 1) + part
        cell = offsets + cells
        rows = tl.load(cell + 1, mask=mask, other=0) - tl.load(cell, mask=mask, other=0)
        low = tl.load(positions + place, mask=mask, other=0)
        sizes = tl.load(positions + place + 1, mask=mask, other=0) - low
        sizes = tl.where(rows > 0, sizes, 0)  # cells without tokens leave no partial sums
        shift = before + tl.cumsum(sizes, axis=0) - sizes - low
        shift = tl.where(rows > 0, shift, NOWHERE)
        tl.store(shifts + cells.to(tl.int64) * PARTS + part, shift, mask=mask)
        before += tl.sum(sizes, axis=0)


def make_parts(layout: CellLayout, reverse: ReverseIndex, row_bytes: int) -> Parts:
    """Cut the experts so that a part's partial sums, `row_bytes` each, fit into memory."""
    pools, pool, num_cells = layout.pools, layout.pool_width, layout.pools.shape[0]
    num_experts, total = reverse.starts.shape[0] - 1, pools.numel()
    most = PART_BYTES if layout.num_rows < MANY_ROWS else PART_BYTES_OF_MANY_ROWS
    most = max(most, gpu_bytes(pools.device) // PART_SHARE)
    count = max(1, triton.cdiv(total * row_bytes, most))
    share = triton.cdiv(total, count)
    experts, positions, shifts = (
        torch.empty(shape, dtype=torch.int32, device=pools.device)
        for shape in ((count + 1,), (num_cells, count + 1), (num_cells, count))
    )
    _positions_kernel[(triton.cdiv(num_cells, SEARCH_BLOCK), count + 1)](
        reverse.starts, pools, experts, positions, num_experts, num_cells, total, share,
        (num_experts + 1).bit_length(), POOL=pool, POOL_STEPS=pool.bit_length(), PARTS=count,
        BLOCK=SEARCH_BLOCK, num_warps=1,
    )  # fmt: skip
    _shifts_kernel[(count,)](
        positions, layout.offsets, shifts, num_cells, PARTS=count, BLOCK=SUM_BLOCK
    )
    # One expert more than a share may be in: it has at most one entry per cell.
    return Parts(experts, positions, shifts, count, share + num_cells)


@triton.jit
def _store_partial(
    partial, scales, total, cell, places, low, high, shift, counts, columns,
    POOL: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    mine = (places >= low) & (places < high)
    if counts is not None:
        count = tl.load(counts + cell.to(tl.int64) * POOL + places, mask=mine, other=0)
        mine &= count > 0
    if scales is not None:
        scale = tl.maximum(tl.max(tl.abs(total), axis=1), SMALLEST_SCALE)
        tl.store(scales + places + shift, scale, mask=mine)
        total *= (1.0 / scale)[:, None]
    store_rows(partial, places + shift, mine, columns, total, DIM)


@triton.jit
def _partial_kernel(
    x, values, partial, scales, offsets, token_ids, positions, shifts, counts, part,
    POOL: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(2)
    low = tl.load(positions + cell * (PARTS + 1) + part)
    high = tl.load(positions + cell * (PARTS + 1) + part + 1)
    # Start on a multiple of 16 so that rows of X are read in wide loads.
    begin = tl.multiple_of(low // 16 * 16, 16)
    split = tl.program_id(1) * BLOCK_P
    first = tl.load(offsets + cell)
    last = tl.load(offsets + cell + 1)
    small = last - first <= BLOCK_R  # the usual cell: one program takes it, the others leave
    mine = (last > first) & ((split == 0) | (last - first > BLOCK_R))
    if (begin + split < high) & mine:
        shift = tl.load(shifts + cell * PARTS + part)
        columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        rows = first + tl.arange(0, BLOCK_R)
        row_mask = rows < last
        tokens = tl.load(token_ids + rows, mask=row_mask, other=0)
        value = load_rows(values, tokens, row_mask, columns, DIM)
        if small:  # its values are read once
            for start in range(begin, high, BLOCK_P):
                places = tl.multiple_of(start, 16) + tl.arange(0, BLOCK_P)
                block = load_rows(x, rows, row_mask, places, POOL)
                total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
                total = dot(block, value, total, True, False, PART)
                _store_partial(
                    partial, scales, total, cell, places, low, high, shift, counts, columns,
                    POOL, DIM,
                )  # fmt: skip
        else:
            for start in range(begin + split, high, SPLITS * BLOCK_P):
                places = tl.multiple_of(start, 16) + tl.arange(0, BLOCK_P)
                total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
                for row in range(first, last, BLOCK_R):
                    rows = row + tl.arange(0, BLOCK_R)
                    row_mask = rows < last
                    tokens = tl.load(token_ids + rows, mask=row_mask, other=0)
                    value = load_rows(values, tokens, row_mask, columns, DIM)
                    block = load_rows(x, rows, row_mask, places, POOL)
                    total = dot(block, value, total, True, False, PART)
                _store_partial(
                    partial, scales, total, cell, places, low, high, shift, counts, columns,
                    POOL, DIM,
                )  # fmt: skip


@triton.jit
def _row_of(entry, shifts, mask, part, POOL: tl.constexpr, PARTS: tl.constexpr):
    """Rows of the partial sums of some entries, and which of these have one."""
    row = entry % POOL + tl.load(shifts + entry // POOL * PARTS + part, mask=mask, other=0)
    return row, mask & (row >= 0)


@triton.jit
def _partial_sums(partial, scales, row, mask, columns, DIM: tl.constexpr):
    """Rows of partial sums, float32; 0 where the mask is not set."""
    sums = load_rows(partial, row, mask, columns, DIM).to(tl.float32)
    if scales is not None:
        sums *= tl.load(scales + row, mask=mask, other=0.0)[:, None]
    return sums


@triton.jit
def _reduce_kernel(
    partial, scales, out, entries, starts, shifts, part_experts, part, table, inverse_norms,
    POOL: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One expert after another: for lists so long that a program waits little in between."""
    first = tl.load(part_experts + part)
    last = tl.load(part_experts + part + 1)
    columns = tl.arange(0, WIDTH)
    column_mask = columns < DIM
    for expert in range(first + tl.program_id(0), last, tl.num_programs(0)):
        begin = tl.load(starts + expert)
        end = tl.load(starts + expert + 1)
        total = tl.zeros((BLOCK_S, WIDTH), tl.float32)
        for start in tl.range(begin, end, BLOCK_S, num_stages=STAGES):
            places = start + tl.arange(0, BLOCK_S)
            entry = tl.load(entries + places, mask=places < end, other=0)
            row, mask = _row_of(entry, shifts, places < end, part, POOL, PARTS)
            total += _partial_sums(partial, scales, row, mask, columns, DIM)
        grad = tl.sum(total, axis=0)
        place = (tl.zeros((WIDTH,), tl.int64) + expert) * DIM + columns
        if inverse_norms is not None:  # the gradient came through w / |w|: drop its radial part
            unit = tl.load(table + place, mask=column_mask, other=0.0).to(tl.float32)
            unit *= tl.load(inverse_norms + expert)
            grad -= unit * tl.sum(grad * unit, axis=0)
        tl.store(out + place, grad.to(out.dtype.element_ty), mask=column_mask)


@triton.jit
def _reduce_short_kernel(
    partial, scales, out, entries, starts, shifts, part_experts, part, table, inverse_norms,
    POOL: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some experts at once, each in the order of its list; other programs hide the waiting.

    A program takes no more experts in a loop: the longest list of the first ones would be the bound
    for all, because Triton (3.6 and 3.7) moves what it reduces of loop-carried lists out of a loop.
    """
    experts = tl.load(part_experts + part) + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    real = experts < tl.load(part_experts + part + 1)
    columns = tl.arange(0, WIDTH)
    begin = tl.load(starts + experts, mask=real, other=0)
    end = tl.load(starts + experts + 1, mask=real, other=0)
    total = tl.zeros((EXPERTS, WIDTH), tl.float32)
    for step in range(0, tl.max(end - begin, axis=0), ROWS):
        entry = ()  # all loads that do not depend on others first: then they wait together
        for ahead in tl.static_range(ROWS):
            place = begin + step + ahead
            entry += (tl.load(entries + place, mask=place < end, other=0),)
        sums = ()
        for ahead in tl.static_range(ROWS):
            mask = begin + step + ahead < end
            row, mask = _row_of(entry[ahead], shifts, mask, part, POOL, PARTS)
            sums += (_partial_sums(partial, scales, row, mask, columns, DIM),)
        for ahead in tl.static_range(ROWS):
            total += sums[ahead]
    if inverse_norms is not None:  # as above
        unit = load_rows(table, experts, real, columns, DIM).to(tl.float32)
        unit *= tl.load(inverse_norms + experts, mask=real, other=0.0)[:, None]
        total -= unit * tl.sum(total * unit, axis=1)[:, None]
    store_rows(out, experts, real, columns, total, DIM)


def table_gradients(
    products: dict[str, tuple[Tensor, Tensor, Tensor]],
    layout: CellLayout,
    *,
    inverse_norms: Tensor | None = None,
    counts: Tensor | None = None,
) -> dict[str, Tensor]:
    """Gradients of tables [E, D] by name, from (X [N, M], values [T, D], table) of each.

    Sums have a fixed order. With `inverse_norms` X is scaled by them already, and the part along
    each row is taken out. With `counts` [G, M], X is 0 where they are.
    """
    found: dict[str, Tensor] = {}
    if not products:
        return found
    x, values, table = next(iter(products.values()))  # the others are of the same kind
    dim, pool, num_cells = values.shape[1], layout.pool_width, layout.pools.shape[0]
    dtype = _partial_dtype(x.dtype, dim, projected=inverse_norms is not None)
    reverse = layout.reverse_index(table.shape[0])
    parts = make_parts(layout, reverse, dim * dtype.itemsize)
    if counts is not None:
        reverse = used_entries(reverse, counts)
    partial = torch.empty(parts.rows, dim, dtype=dtype, device=x.device)
    scaled = inverse_norms is not None and dtype == torch.float16
    scales = torch.empty(parts.rows, dtype=torch.float32, device=x.device) if scaled else None
    config = _partial_config(x, dim, pool, num_cells, parts.count, whole_rows=scaled)
    grid = (triton.cdiv(dim, config["BLOCK_D"]), config["SPLITS"], num_cells)
    short = layout.pools.numel() <= SHORT_LISTS * table.shape[0]
    reduce, sums = _reduce_short_kernel if short else _reduce_kernel, _reduce_config(dim, short)
    programs = min(REDUCE_PROGRAMS, table.shape[0])
    if short:
        programs = triton.cdiv(table.shape[0], sums["EXPERTS"])  # any part may have most experts
    for name, (x, values, table) in products.items():
        found[name] = torch.empty(table.shape, dtype=table.dtype, device=table.device)
        for part in range(parts.count):
            _partial_kernel[grid](
                x, values, partial, scales, layout.offsets, layout.token_ids, parts.positions,
                parts.shifts, counts, part,
                POOL=pool, DIM=dim, PARTS=parts.count, PART=part_dtype(), **config,
            )  # fmt: skip
            reduce[(programs,)](
                partial, scales, found[name], reverse.entries, reverse.starts, parts.shifts,
                parts.experts, part, table, inverse_norms,
                POOL=pool, PARTS=parts.count, DIM=dim, **sums,
            )  # fmt: skip
    return found


def _reduce_config(dim: int, short: bool) -> dict[str, int]:
    """Blocks for short lists or for long ones."""
    width = triton.next_power_of_2(dim)
    if not short:
        return {"WIDTH": width, "BLOCK_S": 4, "STAGES": 3, "num_warps": max(1, width // 256)}
    experts = max(1, SHORT_ELEMENTS // width)
    warps = max(1, min(8, width // SHORT_ELEMENTS))
    return {"WIDTH": width, "EXPERTS": experts, "ROWS": 4, "num_warps": warps, "num_stages": 1}


def _partial_dtype(dtype: torch.dtype, dim: int, *, projected: bool) -> torch.dtype:
    """Of the partial sums of a gradient: that of the products, unless most of it cancels.

    Then float32, or float16 with a scale for each row, whose error is an eighth of bfloat16's.
    """
    if not projected:
        return dtype
    return torch.float16 if dtype in SCALED and dim <= WIDEST_SCALED else torch.float32


def _partial_config(
    x: Tensor, dim: int, pool: int, num_cells: int, parts: int, *, whole_rows: bool
) -> dict[str, int]:
    """Blocks for the partial sums: a whole cell at once where cells are small."""
    mean = triton.next_power_of_2(max(1, x.shape[0] // num_cells))
    whole = mean <= 64
    wide = x.dtype == torch.float32
    if wide:  # its parts are made in registers: nothing to gain from several stages
        rows, block_p, stages = (16 if mean <= 16 else 32), 64, 1
    else:
        rows = max(32, 2 * mean) if whole else 64
        block_p, stages = (64, 3) if whole else (128, 2)
    return {
        "SPLITS": min(8, triton.cdiv(pool, block_p * parts) + 1),  # programs for a large cell
        "BLOCK_R": rows,
        "BLOCK_P": block_size(pool, block_p),
        "BLOCK_D": block_size(dim, WIDEST_SCALED if whole_rows else 128),
        "num_warps": 4 if whole or wide else 8,
        "num_stages": stages,
    }
