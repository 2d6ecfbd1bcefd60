"""The best columns of a product of two tables: top-M experts of codewords or tokens.

    1. some rows times some columns: float32 scores in a buffer that stays in the cache
    2. a sieve passes the scores that beat a row's floor to a short list of that row, columns
       ascending
    3. a list that is full is thinned to its `count` best, and the floor rises to the least of them

After n columns only count / n of the next ones pass, so nearly all scores are written once, read
once and compared once. A few rows would leave most of a GPU idle: their pieces are sieved in parts.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import chunks
from airmoe.kernels.device_triton import (
    INFINITY,
    as_stored,
    bfloat16_parts,
    block_size,
    finite_from_above,
    inverse_root,
    largest,
)
from airmoe.kernels.noise_triton import normal
from airmoe.kernels.top_k import LONGEST_ROW

SCORE_ELEMENTS = 1 << 23  # scores that exist at once: 32 MiB
ROWS = 512  # rows, or parts of fewer rows, that are sieved at once
LEAST_PART = 8192  # columns of a part at least
LEAST_CAPACITY = 2048  # of a list
TILES = 4  # in a list that is full: a tile is sieved at once
LIST_REGISTERS = 64  # so that 32 warps, 512 lists on an H200, run side by side


def _product_config(rows: int, dim: int, products: int, float32: bool) -> dict[str, Any]:
    """For `products` of parts per tile. Two programs share an SM: one multiplies, one jitters."""
    few_rows = rows <= 32  # then reading the columns is all that counts
    deep = not float32 and (few_rows or products == 1)
    depth = block_size(dim, 64 if deep else 32)
    block_rows = max(16, triton.next_power_of_2(rows)) if few_rows else 64 if rows <= 64 else 128
    stages = 4 if few_rows else 3 if rows <= 64 or products <= 3 else 2
    return {
        "BLOCK_R": block_rows, "BLOCK_C": 128, "BLOCK_D": depth,
        "num_warps": 4 if rows <= 64 else 8, "num_stages": stages,
    }  # fmt: skip


@triton.jit
def product(
    rows_at, columns_at, row_stride, column_stride, row_mask, column_mask, depth, dim,
    NORMALIZE: tl.constexpr,
    ROW_PARTS: tl.constexpr, COLUMN_PARTS: tl.constexpr, FLOAT32: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] products; of parts, those pairs that reach a float32's last bit.

    To NORMALIZE columns of one part, their norms are measured as they come by.
    """
    scores = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    squares = tl.zeros((BLOCK_D, BLOCK_C), dtype=tl.float32)
    for start in range(0, dim, BLOCK_D):
        inside = depth < dim - start
        some_rows = row_mask & inside[None, :]
        some_columns = column_mask & inside[:, None]
        if FLOAT32:
            left = tl.load(rows_at + start, mask=some_rows, other=0.0).to(tl.float32)
            right = tl.load(columns_at + start, mask=some_columns, other=0.0).to(tl.float32)
            if NORMALIZE:
                squares += right * right
            scores = tl.dot(left, right, scores, input_precision="tf32x3")
        else:
            for row_part in tl.static_range(ROW_PARTS):
                left = tl.load(rows_at + row_part * row_stride + start, mask=some_rows, other=0.0)
                for column_part in tl.static_range(COLUMN_PARTS):
                    if row_part + column_part < 3:
                        right = tl.load(
                            columns_at + column_part * column_stride + start,
                            mask=some_columns,
                            other=0.0,
                        )
                        if NORMALIZE:
                            squares += right.to(tl.float32) * right.to(tl.float32)
                        scores = tl.dot(left, right, scores)
    if NORMALIZE:
        scores *= inverse_root(tl.sum(squares, axis=0))[None, :]
    return scores


@triton.jit
def _scores_kernel(
    rows_ptr, columns_ptr, scales_ptr, row_keys_ptr, out_ptr, num_rows, num_columns, dim,
    row_stride, column_stride, out_stride, first_column, noise_std,
    NORMALIZE: tl.constexpr,
    ROW_PARTS: tl.constexpr, COLUMN_PARTS: tl.constexpr, FLOAT32: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(num_rows, BLOCK_R)
    # Neighbouring programs share their columns: the larger table is read once.
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) // row_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    depth = tl.arange(0, BLOCK_D)
    real_row = row < num_rows
    real_column = column < num_columns
    rows_at = rows_ptr + row.to(tl.int64)[:, None] * dim + depth[None, :]
    columns_at = columns_ptr + column.to(tl.int64)[None, :] * dim + depth[:, None]
    scores = product(
        rows_at, columns_at, row_stride, column_stride, real_row[:, None], real_column[None, :],
        depth, dim, NORMALIZE, ROW_PARTS, COLUMN_PARTS, FLOAT32, BLOCK_R, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    if scales_ptr is not None:
        scores *= tl.load(scales_ptr + column, mask=real_column, other=0.0)[None, :]
    if row_keys_ptr is not None:
        keys = tl.load(row_keys_ptr + row, mask=real_row, other=0)
        scores += normal(keys[:, None], (first_column + column)[None, :]) * noise_std
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :],
        scores,
        mask=real_row[:, None] & real_column[None, :],
    )


@triton.jit
def _border(scores_ptr, length, count, BLOCK: tl.constexpr):
    """What tells the `count` largest of a list from the others; see `largest`."""
    position = tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + position, mask=position < length, other=-INFINITY)
    return largest(scores, position, length, count, BLOCK)


@triton.jit
def _keep(
    scores_ptr, ids_ptr, best_scores_ptr, best_ids_ptr, held, count,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the `count` best of a list in their order; returns the least score, and their number.

    A list can be copied to its own front.
    """
    tl.debug_barrier()  # other threads wrote the list
    threshold, last = _border(scores_ptr, held, count, CAPACITY)
    kept = held * 0
    # What was in registers is read again: the slots of all scores would not fit beside them.
    for start in range(0, held, TILE):
        position = start + tl.arange(0, TILE)
        real = position < held
        scores = tl.load(scores_ptr + position, mask=real, other=-INFINITY)
        ids = tl.load(ids_ptr + position, mask=real, other=0)
        chosen = real & ((scores > threshold) | ((scores == threshold) & (position <= last)))
        taken = chosen.to(tl.int32)
        slot = kept - 1 + tl.cumsum(taken, axis=0)
        tl.debug_barrier()  # all have read what may be overwritten
        tl.store(best_ids_ptr + slot, ids.to(best_ids_ptr.dtype.element_ty), mask=chosen)
        if best_scores_ptr is not None:
            tl.store(best_scores_ptr + slot, scores, mask=chosen)
        kept += tl.sum(taken, axis=0)
    return threshold, kept


@triton.jit
def _part_border(num_columns, part, parts):
    """Where a part of a row begins: parts are equally long, up to what aligned loads ask for."""
    border = (part.to(tl.int64) * num_columns // parts // 16 * 16).to(tl.int32)
    return tl.where(part == parts, num_columns, border)


@triton.jit
def _sieve_kernel(
    scores_ptr, ids_ptr, list_scores_ptr, list_ids_ptr, held_ptr, floors_ptr,
    num_columns, score_stride, first_id, count,
    FIRST: tl.constexpr, CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    begin, end = _part_border(num_columns, part, parts), _part_border(num_columns, part + 1, parts)
    scores_ptr += row * score_stride
    number = row * parts + part
    list_scores_ptr += number * CAPACITY
    list_ids_ptr += number * CAPACITY
    if FIRST:
        held = begin * 0
        floor = tl.full((), float("nan"), tl.float32)  # nothing is below it
    else:
        held = tl.load(held_ptr + number)
        floor = tl.load(floors_ptr + number)
    for start in range(begin, end, TILE):
        if held + tl.minimum(TILE, end - start) > CAPACITY:
            floor, held = _keep(
                list_scores_ptr, list_ids_ptr, list_scores_ptr, list_ids_ptr, held, count,
                CAPACITY, TILE,
            )  # fmt: skip
        position = start + tl.arange(0, TILE)
        real = position < end
        scores = tl.load(scores_ptr + position, mask=real, other=-INFINITY)
        scores = finite_from_above(scores) + 0.0  # -0 and 0 are a tie
        passed = real & ((scores <= floor) == 0)  # a tie is lost to those that came before
        taken = passed.to(tl.int32)
        slot = held - 1 + tl.cumsum(taken, axis=0)
        ids = first_id + position
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + row * score_stride + position, mask=passed, other=0)
        tl.store(list_scores_ptr + slot, scores, mask=passed)
        tl.store(list_ids_ptr + slot, ids, mask=passed)
        held += tl.sum(taken, axis=0)
    tl.store(held_ptr + number, held)
    tl.store(floors_ptr + number, floor)


@triton.jit
def _best_kernel(
    list_scores_ptr, list_ids_ptr, held_ptr, best_scores_ptr, best_ids_ptr, best_stride, count,
    CAPACITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = row * tl.num_programs(1) + part
    place = row * best_stride + part * count
    if best_scores_ptr is not None:
        best_scores_ptr += place
    _keep(
        list_scores_ptr + number * CAPACITY, list_ids_ptr + number * CAPACITY, best_scores_ptr,
        best_ids_ptr + place, tl.load(held_ptr + number), count, CAPACITY, TILE,
    )  # fmt: skip


@dataclass(frozen=True)
class Tables:
    """Rows and columns to multiply, with what is done to the products."""

    rows: Tensor  # [parts, N, D]
    columns: Tensor  # [parts, E, D]
    scales: Tensor | None  # [E]
    row_keys: Tensor | None  # [N] of the jitter
    noise_std: float
    float32: bool  # multiply as float32, or as what the parts are
    normalize: bool = False  # columns of norm 1, measured during the product; one part each

    def keys_of(self, rows: slice) -> Tensor | None:
        return None if self.row_keys is None else self.row_keys[rows]

    def score(self, rows: slice, columns: slice, out: Tensor) -> None:
        """out [rows, >= columns] = scaled products + jitter."""
        left, right = self.rows[:, rows], self.columns[:, columns]
        (row_parts, num_rows, dim), (column_parts, num_columns, _) = left.shape, right.shape
        config = _product_config(num_rows, dim, row_parts * column_parts, self.float32)
        grid = triton.cdiv(num_rows, config["BLOCK_R"])
        grid *= triton.cdiv(num_columns, config["BLOCK_C"])
        _scores_kernel[(grid,)](
            left, right,
            None if self.scales is None else self.scales[columns],
            self.keys_of(rows),
            out, num_rows, num_columns, dim, left.stride(0), right.stride(0), out.stride(0),
            columns.start, self.noise_std,
            NORMALIZE=self.normalize, ROW_PARTS=row_parts, COLUMN_PARTS=column_parts,
            FLOAT32=self.float32, **config,
        )  # fmt: skip


def whole(table: Tensor) -> Tensor:
    """A table as its only part: [1, N, D]."""
    return as_stored(table).unsqueeze(0)


@dataclass(frozen=True)
class Cut:
    """How rows are cut: a piece of them is multiplied at a time, and its parts sieved at once."""

    rows: int  # handled together
    borders: list[int]  # of the pieces
    parts: int  # of a piece; with one, a row has one list for all its pieces

    @classmethod
    def of(cls, num_rows: int, num_columns: int, count: int) -> Cut:
        rows = min(num_rows, ROWS)
        pieces = triton.cdiv(num_columns, max(16, SCORE_ELEMENTS // rows))
        borders = [num_columns * piece // pieces // 16 * 16 for piece in range(pieces)]
        parts = min(ROWS // rows, num_columns // pieces // max(2 * count, LEAST_PART))
        return cls(rows, [*borders, num_columns], max(1, parts))


class Sieve:
    """A list for every row, or part of a row, of its best scores so far and some others."""

    def __init__(self, num_lists: int, capacity: int, count: int, device: torch.device) -> None:
        wanted = int(triton.next_power_of_2(max(capacity, LEAST_CAPACITY)))
        capacity = min(wanted, LONGEST_ROW)
        self.count, shape = count, (num_lists, capacity)
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.ids = torch.empty(shape, dtype=torch.int32, device=device)
        self.held = torch.empty(num_lists, dtype=torch.int32, device=device)
        self.floors = torch.empty(num_lists, dtype=torch.float32, device=device)
        self.config = {
            "CAPACITY": capacity, "TILE": capacity // TILES,
            "num_warps": max(2, capacity // 1024), "maxnreg": LIST_REGISTERS,
        }  # fmt: skip

    def add(
        self, scores: Tensor, ids: Tensor | None, columns: slice, parts: int = 1, first: bool = True
    ) -> None:
        """Pass scores [rows, >= columns] to the lists, which are empty before the `first`.

        `ids` [rows, columns]; without them a score's id is its column.
        """
        _sieve_kernel[(scores.shape[0], parts)](
            scores, ids, self.scores, self.ids, self.held, self.floors,
            columns.stop - columns.start, scores.stride(0), columns.start, self.count,
            FIRST=first, **self.config,
        )  # fmt: skip

    def write(self, scores: Tensor | None, ids: Tensor, parts: int = 1) -> None:
        """The best of every list, ids ascending: [rows, parts * count]."""
        _best_kernel[(ids.shape[0], parts)](
            self.scores, self.ids, self.held, scores, ids, ids.stride(0), self.count, **self.config
        )


def best_columns(tables: Tables, ids: Tensor, scores: Tensor | None = None) -> None:
    """Write the best columns of every row: ids [N, count] ascending, and scores.

    Some rows at a time, in buffers that are used again.
    """
    (num_rows, count), num_columns, device = ids.shape, tables.columns.shape[1], ids.device
    cut = Cut.of(num_rows, num_columns, count)
    pieces = [slice(*border) for border in pairwise(cut.borders)]
    widest = triton.cdiv(max(piece.stop - piece.start for piece in pieces), 16) * 16
    buffer = torch.empty(cut.rows, widest, dtype=torch.float32, device=device)
    if cut.parts > 1:
        best_of_parts(tables, ids, scores, buffer, pieces, cut.parts)
        return
    sieve = Sieve(cut.rows, 4 * count, count, device)
    for rows in chunks(num_rows, cut.rows):
        for piece in pieces:
            some = buffer[: rows.stop - rows.start]
            tables.score(rows, piece, some)
            sieve.add(some, None, piece, first=piece is pieces[0])
        sieve.write(None if scores is None else scores[rows], ids[rows])


def best_of_parts(
    tables: Tables,
    ids: Tensor,
    scores: Tensor | None,
    buffer: Tensor,
    pieces: list[slice],
    parts: int,
) -> None:
    """A few rows: the best of each part are candidates, and a second sieve takes the best of them.

    Candidates stand in the order of their ids, so a tie between them goes to the lowest id.
    """
    (num_rows, count), device = ids.shape, ids.device
    width = len(pieces) * parts * count
    dtypes = torch.float32, torch.int32
    found = [torch.empty(num_rows, width, dtype=dtype, device=device) for dtype in dtypes]
    sieve = Sieve(num_rows * parts, LONGEST_ROW, count, device)
    for number, piece in enumerate(pieces):
        tables.score(slice(0, num_rows), piece, buffer)
        sieve.add(buffer, None, piece, parts)
        mine = slice(number * parts * count, (number + 1) * parts * count)
        sieve.write(*(each[:, mine] for each in found), parts)
    final = Sieve(num_rows, LONGEST_ROW, count, device)
    final.add(*found, slice(0, width))
    final.write(scores, ids)


def top_m(
    codewords: Tensor,
    centroids: Tensor,
    size: int,
    inverse_norms: Tensor | None,
    row_keys: Tensor | None,
    noise_std: float,
) -> Tensor:
    """Codewords [G, D] float32 or in the centroids' dtype, centroids [E, D] -> [G, size] ids."""
    ids = torch.empty(codewords.shape[0], size, dtype=torch.int64, device=codewords.device)
    if codewords.shape[0] == 0:
        return ids
    narrow = codewords.dtype.itemsize == 2
    in_parts = not narrow and centroids.dtype == torch.bfloat16
    rows = bfloat16_parts(codewords) if in_parts else whole(codewords)
    tables = Tables(
        rows, whole(centroids), inverse_norms, row_keys, noise_std, float32=not (in_parts or narrow)
    )
    best_columns(tables, ids)
    return ids
