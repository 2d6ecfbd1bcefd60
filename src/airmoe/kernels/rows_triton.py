"""The products of `rows.py` in Triton: rows fetched by index, nothing of size [Q, J, D].

    row_dots     one program per query (or part of its list) and tile after tile of its ids
    row_totals   one program per query and block of columns
    row_sums     the entries of all lists sorted by id, one program per id and block of columns;
                 a popular id is cut into parts that a second kernel adds up
    table_grads  the same for logits over normalized rows: whole rows, whose part along the row
                 itself is taken out of the float32 sum before it is rounded: it may be nearly all

Every sum is taken in float32 and in an order that depends on the lists only: no float atomics.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.device_triton import block_size, inverse_root, load_rows
from airmoe.kernels.norms_triton import inverse_norms

TILE_ELEMENTS = 4096  # [ids, columns] of one fetch: with 4 warps 32 values per thread and table
MOST_COLUMNS = 256  # of one tile
MOST_COLUMNS_IN_PAIRS = 128  # of one tile whose rows are fetched two values at a time
MOST_IDS = 64
NUM_WARPS = 4
ENOUGH_PROGRAMS = 4 * 132  # below it, the list of a query is shared by several programs
PART_ENTRIES = 1024  # of one id, summed by one program
SCALE_BLOCK = 1024
T = TypeVar("T")


def tile_shape(num_ids: int, dim: int) -> tuple[int, int]:
    """(ids, columns) of one tile: powers of two."""
    # An even row that is no multiple of 4 is fetched in pairs. Four warps would cover 256 columns
    # of it, each thread alone with its two, and sums over the ids would stay inside of threads. On
    # that LLVM's SLP vectorizer aborts the process (in Triton 3.6: two weights of `_sums_kernel` in
    # bfloat16 or float16). With 128 columns warps share the ids, and add through shared memory.
    most_columns = MOST_COLUMNS_IN_PAIRS if dim % 4 == 2 else MOST_COLUMNS
    columns = block_size(dim, most_columns)
    ids = min(TILE_ELEMENTS // columns, triton.next_power_of_2(max(num_ids, 2)), MOST_IDS)
    return ids, columns


def pair(values: Sequence[T]) -> tuple[T, T | None]:
    """One or two operands, as kernels take them."""
    return values[0], values[1] if len(values) == 2 else None


@triton.jit
def query_times_rows(
    query, table_1, table_2, rows, mask,
    DIM: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """A query times rows of table_1 and of table_2, elementwise, and the squares of those of
    table_1: [BLOCK_J, BLOCK_D] each, still to be added up along the columns."""
    total_1 = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    total_2 = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    squares = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    for column in range(0, DIM, BLOCK_D):
        columns = column + tl.arange(0, BLOCK_D)
        query_values = tl.load(query + columns, mask=columns < DIM, other=0.0)
        query_values = query_values.to(tl.float32)[None, :]
        values_1 = load_rows(table_1, rows, mask, columns, DIM)
        if table_2 is not None:
            values_2 = load_rows(table_2, rows, mask, columns, DIM)
            total_2 += values_2.to(tl.float32) * query_values
        values_1 = values_1.to(tl.float32)
        total_1 += values_1 * query_values
        if SQUARES:
            squares += values_1 * values_1
    return total_1, total_2, squares


@triton.jit
def _dots_kernel(
    queries, table_1, table_2, ids, dots_1, dots_2,
    num_ids, tiles_per_program,
    DIM: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_program * BLOCK_J
    last = tl.minimum(first + tiles_per_program * BLOCK_J, num_ids)
    lanes = tl.arange(0, BLOCK_J)
    own = query * num_ids
    next_ids = tl.load(ids + own + first + lanes, mask=first + lanes < last, other=0)
    for start in range(first, last, BLOCK_J):
        places = start + lanes
        mask = places < last
        rows = next_ids.to(tl.int64)
        # The ids of the next tile come while the rows of this one are on their way.
        next_ids = tl.load(ids + own + places + BLOCK_J, mask=places + BLOCK_J < last, other=0)
        total_1, total_2, squares = query_times_rows(
            queries + query * DIM, table_1, table_2, rows, mask, DIM, BLOCK_J, BLOCK_D, NORMALIZE
        )
        sum_1 = tl.sum(total_1, axis=1)
        if NORMALIZE:
            sum_1 *= inverse_root(tl.sum(squares, axis=1))
        tl.store(dots_1 + own + places, sum_1.to(dots_1.dtype.element_ty), mask=mask)
        if table_2 is not None:
            sum_2 = tl.sum(total_2, axis=1)
            tl.store(dots_2 + own + places, sum_2.to(dots_2.dtype.element_ty), mask=mask)


def row_dots(
    queries: Tensor,
    tables: list[Tensor],
    ids: Tensor,
    dtype: torch.dtype,
    *,
    normalize: bool = False,
) -> list[Tensor]:
    """<queries[q], table[ids[q, j]]>: [Q, J] for each of the tables, one or two.

    With `normalize` (of one table) over the norm of the row.
    """
    assert not (normalize and len(tables) == 2)
    (num_queries, num_ids), dim = ids.shape, queries.shape[1]
    dots = [torch.empty(ids.shape, dtype=dtype, device=ids.device) for _ in tables]
    if ids.numel() == 0:
        return dots
    block_j, block_d = tile_shape(num_ids, dim)
    tiles = triton.cdiv(num_ids, block_j)
    tiles_per_program = min(max(num_queries * tiles // ENOUGH_PROGRAMS, 1), tiles)
    _dots_kernel[(num_queries, triton.cdiv(tiles, tiles_per_program))](
        queries, *pair(tables), ids, *pair(dots), num_ids, tiles_per_program,
        DIM=dim, BLOCK_J=block_j, BLOCK_D=block_d, NORMALIZE=normalize, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dots


@triton.jit
def _totals_kernel(
    weights_1, table_1, weights_2, table_2, ids, totals, num_ids,
    DIM: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < DIM
    lanes = tl.arange(0, BLOCK_J)
    own = query * num_ids
    next_ids = tl.load(ids + own + lanes, mask=lanes < num_ids, other=0)
    total = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
    for start in range(0, num_ids, BLOCK_J):
        places = start + lanes
        mask = places < num_ids
        rows = next_ids.to(tl.int64)
        next_ids = tl.load(ids + own + places + BLOCK_J, mask=places + BLOCK_J < num_ids, other=0)
        weights = tl.load(weights_1 + own + places, mask=mask, other=0.0).to(tl.float32)
        values = load_rows(table_1, rows, mask, columns, DIM)
        if table_2 is not None:
            other = tl.load(weights_2 + own + places, mask=mask, other=0.0).to(tl.float32)
            other_values = load_rows(table_2, rows, mask, columns, DIM)
            total += other[:, None] * other_values.to(tl.float32)
        total += weights[:, None] * values.to(tl.float32)
    summed = tl.sum(total, axis=0).to(totals.dtype.element_ty)
    tl.store(totals + query * DIM + columns, summed, mask=inside)


def row_totals(pairs: list[tuple[Tensor, Tensor]], ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[Q, D]: sum over (weights [Q, J], table [R, D]), one or two pairs, and over each list."""
    (num_queries, num_ids), dim = ids.shape, pairs[0][1].shape[1]
    totals = torch.empty(num_queries, dim, dtype=dtype, device=ids.device)
    block_j, block_d = tile_shape(num_ids, dim)
    # Queries run fastest: one block of columns of the whole table is in use at a time.
    _totals_kernel[(num_queries, triton.cdiv(dim, block_d))](
        *pairs[0], *(pair(pairs)[1] or (None, None)), ids, totals, num_ids,
        DIM=dim, BLOCK_J=block_j, BLOCK_D=block_d, num_warps=NUM_WARPS,
    )  # fmt: skip
    return totals


@dataclass(frozen=True)
class Entries:
    """All (query, place) entries of the lists, sorted by id; an entry is q * J + j."""

    order: Tensor  # [Q * J] int64
    starts: Tensor  # [R + 1] int64: first entry of each id
    part_ends: Tensor  # [R] int64: parts of all ids up to this one, of ids with many entries only
    part_ids: Tensor  # [parts] int64: the id of each part, R = unused
    list_size: int  # J


def sort_entries(ids: Tensor, num_rows: int) -> Entries:
    """ids [Q, J] below `num_rows` -> the entries of each, nothing read by the host."""
    keys, order = ids.flatten().int().sort(stable=True)
    marks = torch.arange(num_rows + 1, device=ids.device, dtype=torch.int32)
    starts = torch.searchsorted(keys, marks)
    sizes = starts.diff()
    parts = (sizes + (PART_ENTRIES - 1)).div(PART_ENTRIES, rounding_mode="floor")
    part_ends = (parts * (sizes > PART_ENTRIES)).cumsum(0)
    # Ids with more than one part: at most one per PART_ENTRIES entries, one part of each not full.
    full = keys.shape[0] // PART_ENTRIES
    places = torch.arange(full + min(full, num_rows), device=ids.device)
    part_ids = torch.searchsorted(part_ends, places, right=True)
    return Entries(order, starts, part_ends, part_ids, ids.shape[1])


@triton.jit
def _across(total, table, row, columns, inside, DIM: tl.constexpr):
    """The gradient of a row w from that of w / |w|: what is across it, over its norm."""
    unit = tl.load(table + row * DIM + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = inverse_root(tl.sum(unit * unit, axis=0))
    unit *= inverse
    return (total - unit * tl.sum(total * unit, axis=0)) * inverse


@triton.jit
def _sums_kernel(
    weights_1, weights_2, rows, table, sums_1, sums_2, partial_1, partial_2,
    order, starts, part_ends, part_ids, num_parts, num_rows,
    LIST: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)  # the parts come first, then every id once
    is_part = program < num_parts
    row = tl.load(part_ids + program, mask=is_part, other=0)
    row = tl.where(is_part, row, (program - num_parts).to(tl.int64))
    if row < num_rows:
        begin = tl.load(starts + row)
        end = tl.load(starts + row + 1)
        many = end - begin > PART
        if is_part == many:  # an id with many entries is left to its parts
            first_part = tl.load(part_ends + row - 1, mask=row > 0, other=0)
            begin = tl.where(is_part, begin + (program - first_part) * PART, begin)
            end = tl.minimum(end, begin + PART)
            columns = tl.arange(0, BLOCK_D)
            if table is None:  # else whole rows are needed
                columns += tl.program_id(1) * BLOCK_D
            inside = columns < DIM
            lanes = tl.arange(0, BLOCK_N)
            total_1 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            total_2 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            next_entries = tl.load(order + begin + lanes, mask=begin + lanes < end, other=0)
            for start in range(begin, end, BLOCK_N):
                places = start + lanes
                mask = places < end
                entries = next_entries
                next_entries = tl.load(
                    order + places + BLOCK_N, mask=places + BLOCK_N < end, other=0
                )
                factors = tl.load(weights_1 + entries, mask=mask, other=0.0).to(tl.float32)
                values = load_rows(rows, entries // LIST, mask, columns, DIM).to(tl.float32)
                if weights_2 is not None:
                    others = tl.load(weights_2 + entries, mask=mask, other=0.0).to(tl.float32)
                    total_2 += others[:, None] * values
                total_1 += factors[:, None] * values
            sum_1 = tl.sum(total_1, axis=0)
            sum_2 = tl.sum(total_2, axis=0)
            target = tl.where(is_part, program.to(tl.int64), row) * DIM + columns
            if is_part:
                tl.store(partial_1 + target, sum_1, mask=inside)
                if weights_2 is not None:
                    tl.store(partial_2 + target, sum_2, mask=inside)
            else:
                if table is not None:
                    sum_1 = _across(sum_1, table, row, columns, inside, DIM)
                tl.store(sums_1 + target, sum_1.to(sums_1.dtype.element_ty), mask=inside)
                if weights_2 is not None:
                    tl.store(sums_2 + target, sum_2.to(sums_2.dtype.element_ty), mask=inside)


@triton.jit
def _add_parts_kernel(
    partial, table, sums, part_ends, part_ids, num_rows,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.load(part_ids + part)
    if row < num_rows:
        first = tl.load(part_ends + row - 1, mask=row > 0, other=0)
        if part == first:  # one program per id, all its parts
            last = tl.load(part_ends + row)
            columns = tl.arange(0, BLOCK_D)
            if table is None:
                columns += tl.program_id(1) * BLOCK_D
            inside = columns < DIM
            total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            for start in range(first, last, BLOCK_N):
                parts = start + tl.arange(0, BLOCK_N)
                total += load_rows(partial, parts, parts < last, columns, DIM)
            summed = tl.sum(total, axis=0)
            if table is not None:
                summed = _across(summed, table, row, columns, inside, DIM)
            tl.store(sums + row * DIM + columns, summed.to(sums.dtype.element_ty), mask=inside)


def row_sums(
    weights: list[Tensor], rows: Tensor, entries: Entries, dtype: torch.dtype
) -> list[Tensor]:
    """[R, D] per weights (one or two, [Q, J]): sum over an id's entries of weight * rows[q]."""
    block_n, block_d = tile_shape(PART_ENTRIES, rows.shape[1])
    sizes = {"BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": NUM_WARPS}
    return _sums(weights, rows, None, entries, dtype, sizes)


def table_grads(
    grads: Tensor, hidden: Tensor, table: Tensor, entries: Entries, *, project: bool
) -> Tensor:
    """Gradient of the table [R, D] in its dtype from that of the logits, grads [T, K] float32.

    With `project` the logits were those of normalized rows.
    """
    width = max(triton.next_power_of_2(table.shape[1]), 16)
    sizes = {
        "BLOCK_N": max(TILE_ELEMENTS // width, 2), "BLOCK_D": width,
        "num_warps": max(NUM_WARPS, width // 512),
    }  # fmt: skip
    return _sums([grads], hidden, table if project else None, entries, table.dtype, sizes)[0]


def _sums(
    weights: list[Tensor],
    rows: Tensor,
    table: Tensor | None,
    entries: Entries,
    dtype: torch.dtype,
    sizes: dict[str, int],
) -> list[Tensor]:
    """[R, D] for each of the weights; with a table what is across its rows."""
    num_rows, num_parts, dim = entries.starts.shape[0] - 1, len(entries.part_ids), rows.shape[1]
    sums = [torch.empty(num_rows, dim, dtype=dtype, device=rows.device) for _ in weights]
    if sums[0].numel() == 0:
        return sums
    partial = torch.empty(len(weights), num_parts, dim, dtype=torch.float32, device=rows.device)
    column_blocks = triton.cdiv(dim, sizes["BLOCK_D"])
    _sums_kernel[(num_parts + num_rows, column_blocks)](
        *pair(weights), rows, table, *pair(sums), *pair(partial),
        entries.order, entries.starts, entries.part_ends, entries.part_ids, num_parts, num_rows,
        LIST=max(entries.list_size, 1), DIM=dim, PART=PART_ENTRIES, **sizes,
    )  # fmt: skip
    for part_sums, total in zip(partial, sums, strict=True):
        if num_parts:
            _add_parts_kernel[(num_parts, column_blocks)](
                part_sums, table, total, entries.part_ends, entries.part_ids, num_rows,
                DIM=dim, **sizes,
            )  # fmt: skip
    return sums


@triton.jit
def _scale_kernel(grads, ids, inverse, scaled, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    row = tl.load(ids + place, mask=mask, other=0)
    factor = tl.load(inverse + row, mask=mask, other=0.0)
    tl.store(scaled + place, tl.load(grads + place, mask=mask, other=0.0) * factor, mask=mask)


def _scale_by_rows(grads: Tensor, ids: Tensor, inverse: Tensor) -> Tensor:
    """grads [T, K] float32 times inverse[ids]."""
    scaled = torch.empty_like(grads)
    _scale_kernel[(triton.cdiv(grads.numel(), SCALE_BLOCK),)](
        grads, ids, inverse, scaled, grads.numel(), BLOCK=SCALE_BLOCK, num_warps=NUM_WARPS
    )
    return scaled


def gather_dot(queries: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """In the dtype of the queries."""
    queries, table, ids = queries.contiguous(), table.contiguous(), ids.contiguous()
    return row_dots(queries, [table], ids, queries.dtype)[0]


def gather_total(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """In the dtype of the table."""
    pair = weights.contiguous(), table.contiguous()
    return row_totals([pair], ids.contiguous(), table.dtype)


def scatter_total(weights: Tensor, rows: Tensor, ids: Tensor, num_out: int) -> Tensor:
    """In the dtype of the rows."""
    entries = sort_entries(ids, num_out)
    return row_sums([weights.contiguous()], rows.contiguous(), entries, rows.dtype)[0]


def chosen_logits(hidden: Tensor, experts: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """[T, K] float32; norms are taken where the rows are fetched."""
    hidden, experts, ids = hidden.contiguous(), experts.contiguous(), ids.contiguous()
    return row_dots(hidden, [experts], ids, torch.float32, normalize=normalize)[0]


def chosen_logits_backward(call: Any, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of the wanted of hidden and experts."""
    hidden, experts, ids = call.hidden.contiguous(), call.experts.contiguous(), call.ids
    grads, ids, found = call.grad_output.float(), ids.contiguous(), dict[str, Tensor]()
    if "hidden" in wanted:
        norms = inverse_norms(experts) if call.normalize else None
        factors = grads if norms is None else _scale_by_rows(grads, ids, norms)
        found["hidden"] = row_totals([(factors, experts)], ids, hidden.dtype)
    if "experts" in wanted:
        entries = sort_entries(ids, experts.shape[0])
        found["experts"] = table_grads(grads, hidden, experts, entries, project=call.normalize)
    return found
