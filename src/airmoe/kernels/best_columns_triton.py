"""The best columns of a product of two tables: top-M experts of codewords or tokens.

    1. some rows times the first columns: the best of each row start its list, columns ascending,
       and the least of them is the row's floor
    2. the rows times the next columns: only scores above their row's floor are stored, with a bit
       for every score that says which
    3. a sieve reads the bits and appends those scores to the lists
    4. a list that is full is thinned to its best, and the floor rises to the least of them

After n columns only count / n of the next ones pass, so most scores never leave the chip.
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

from airmoe.kernels.backend import chunks, interpreted
from airmoe.kernels.device_triton import (
    INFINITY,
    as_stored,
    bfloat16_parts,
    block_size,
    border,
    finite_from_above,
    inverse_root,
    last_equal,
)
from airmoe.kernels.noise_triton import normal
from airmoe.kernels.top_k import LONGEST_ROW

SCORE_ELEMENTS = 1 << 23  # scores that exist at once: 32 MiB
ROWS = 512  # handled at once
FEW_ROWS = 32  # then reading the columns is all that counts
BLOCK_COLUMNS = 128  # of a tile of scores
WORD = tl.constexpr(32)  # columns that a word has bits for
MOST_WORDS = 512  # that are sieved at once
LEAST_CAPACITY = 2048  # of a list
LIST_COUNTS = 4  # capacity of a list in numbers of scores that are wanted of it
DIRECT_STORES = True  # scores that pass are written by an instruction of the assembler
LIST_REGISTERS = 64  # so that 32 warps, 512 lists on an H200, run side by side


def _tile_rows(rows: int) -> int:
    few_rows = rows <= FEW_ROWS
    return block_size(rows, FEW_ROWS) if few_rows else 64 if rows <= 64 else 128


def _product_config(rows: int, dim: int, products: int, float32: bool) -> dict[str, Any]:
    """For `products` of parts per tile. Two programs share an SM: one multiplies, one jitters."""
    few_rows = rows <= FEW_ROWS
    deep = not float32 and (few_rows or products == 1)
    depth = block_size(dim, 64 if deep else 32)
    stages = 4 if few_rows else 3 if rows <= 64 or products <= 3 else 2
    return {
        "BLOCK_R": _tile_rows(rows), "BLOCK_C": BLOCK_COLUMNS, "BLOCK_D": depth,
        "num_warps": 4 if rows <= 64 else 8, "num_stages": stages,
        "maxnreg": None if float32 or rows <= 64 else 128,
    }  # fmt: skip


def _list_config(length: int) -> dict[str, int]:
    """For a program that keeps so many scores in registers."""
    block = max(int(triton.next_power_of_2(length)), 32)
    return {
        "BLOCK": block, "TILE": max(block // 4, 32),
        "num_warps": max(2, block // 1024), "maxnreg": LIST_REGISTERS,
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
def _store_passed(rows_at, column, scores, floor, bit, DIRECT: tl.constexpr):
    """Store the scores above their row's floor; returns their bits, and 0 for the others."""
    if DIRECT:
        # tl.store would first move all of it, through shared memory, into the layout that suits
        # whole rows; here few and scattered scores are written from where they are. "Pure" lets
        # the compiler move the stores: in a fixed order their operands do not fit into registers.
        bits = tl.inline_asm_elementwise(
            """{ .reg .pred passed;
            setp.gtu.f32 passed, $2, $3;
            @passed st.global.f32 [$1], $2;
            selp.b32 $0, $4, 0, passed; }""",
            "=r,l,f,f,r",
            [(rows_at + column).to(tl.int64), scores, floor, bit],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        passed = (scores <= floor) == 0  # NaN passes, a tie is lost to those that came before
        tl.store(rows_at + column, scores, mask=passed)
        bits = tl.where(passed, bit, 0)
    return bits


@triton.jit
def _scores_kernel(
    rows_ptr, columns_ptr, scales_ptr, row_keys_ptr, out_ptr, floors_ptr, passed_ptr,
    num_rows, num_columns, dim,
    row_stride, column_stride, out_stride, passed_stride, first_column, noise_std,
    NORMALIZE: tl.constexpr,
    ROW_PARTS: tl.constexpr, COLUMN_PARTS: tl.constexpr, FLOAT32: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Scores of whole tiles, for which `out` has room; those of a row with a floor if they pass."""
    row_blocks = tl.cdiv(num_rows, BLOCK_R)
    # Neighbouring programs share their columns: the larger table is read once.
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    column_block = tl.program_id(0) // row_blocks
    column = column_block * BLOCK_C + tl.arange(0, BLOCK_C)
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
    out_ptr += row.to(tl.int64)[:, None] * out_stride
    if floors_ptr is None:
        tl.store(out_ptr + column[None, :], scores)
    else:
        floor = tl.load(floors_ptr + row, mask=real_row, other=0.0)
        bit = 1 << (tl.arange(0, BLOCK_C) % WORD)
        bits = _store_passed(out_ptr, column[None, :], scores, floor[:, None], bit[None, :], DIRECT)
        words = tl.sum(tl.reshape(bits, (BLOCK_R, BLOCK_C // WORD, WORD)), axis=2)
        real = tl.where(real_column, bit, 0)
        words &= tl.sum(tl.reshape(real, (BLOCK_C // WORD, WORD)), axis=1)[None, :]
        word = column_block * (BLOCK_C // WORD) + tl.arange(0, BLOCK_C // WORD)
        words_at = passed_ptr + row.to(tl.int64)[:, None] * passed_stride + word[None, :]
        tl.store(words_at, words, mask=real_row[:, None])


@triton.jit
def _border(scores_ptr, length, count, room, BLOCK: tl.constexpr):
    """(threshold, last): `count` to `room` best of some scores, ties to the lowest position.

    They are those above the threshold, and those equal to it at positions up to `last`.
    """
    position = tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + position, mask=position < length, other=-INFINITY)
    scores = finite_from_above(scores) + 0.0  # -0 and 0 are a tie
    threshold, reached = border(scores, length, count, room)
    last = length - 1
    if reached > room:
        last = last_equal(scores, position, threshold, count, BLOCK)
    return threshold, last


@triton.jit
def _keep(
    scores_ptr, ids_ptr, best_scores_ptr, best_ids_ptr, length, count, room,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the best of some scores in their order, at least `count` and at most `room` of them.

    Returns a threshold that `count` scores reach, and how many were copied. Without ids those of
    the scores are their positions. A list can be copied to its own front.
    """
    tl.debug_barrier()  # other threads wrote the list
    threshold, last = _border(scores_ptr, length, count, room, BLOCK)
    kept = length * 0
    # What was in registers is read again: the slots of all scores would not fit beside them.
    for start in range(0, length, TILE):
        # A thread that may clamp an address loads one score at a time. With four neighbours in a
        # thread, all would go through shared memory before the scattered stores.
        position = start + tl.arange(0, TILE)
        clamped = tl.minimum(position, length - 1)
        scores = tl.load(scores_ptr + clamped)
        scores = finite_from_above(scores) + 0.0
        ids = position
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + clamped)
        chosen = (position < length) & (
            (scores > threshold) | ((scores == threshold) & (position <= last))
        )
        taken = chosen.to(tl.int32)
        slot = kept - 1 + tl.cumsum(taken, axis=0)
        tl.debug_barrier()  # all have read what may be overwritten
        tl.store(best_ids_ptr + slot, ids.to(best_ids_ptr.dtype.element_ty), mask=chosen)
        if best_scores_ptr is not None:
            tl.store(best_scores_ptr + slot, scores, mask=chosen)
        kept += tl.sum(taken, axis=0)
    return threshold, kept


@triton.jit
def _ones(words):
    """How many bits of each int32 are set."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words += words >> 8
    return (words + (words >> 16)) & 0x3F


@triton.jit
def _sieve_kernel(
    scores_ptr, passed_ptr, list_scores_ptr, list_ids_ptr, held_ptr, floors_ptr,
    num_words, score_stride, passed_stride, first_column, count, room,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * score_stride
    passed_ptr += row * passed_stride
    list_scores_ptr += row * CAPACITY
    list_ids_ptr += row * CAPACITY
    held = tl.load(held_ptr + row)
    start = held * 0
    while start < num_words:
        word = start + tl.arange(0, WORDS)
        words = tl.load(passed_ptr + tl.minimum(word, num_words - 1))  # one by one, as in `_keep`
        words = tl.where(word < num_words, words, 0)
        counts = _ones(words)
        ends = held + tl.cumsum(counts, axis=0)
        fits = ends <= CAPACITY
        slot = ends - counts
        words = tl.where(fits, words, 0)
        steps = tl.max(tl.where(fits, counts, 0), axis=0)
        held = tl.max(tl.where(fits, ends, held), axis=0)
        advance = tl.sum(fits.to(tl.int32), axis=0)
        for _ in range(0, steps):  # a bit of every word that has some left
            live = words != 0
            less = tl.sub(words, 1, sanitize_overflow=False)
            column = word * WORD + _ones(less & ~words)
            words &= less
            scores = tl.load(scores_ptr + column, mask=live, other=0.0)
            tl.store(list_scores_ptr + slot, scores, mask=live)
            tl.store(list_ids_ptr + slot, first_column + column, mask=live)
            slot += 1
        start += advance
        if advance < WORDS:
            floor, held = _keep(
                list_scores_ptr, list_ids_ptr, list_scores_ptr, list_ids_ptr, held, count, room,
                CAPACITY, TILE,
            )  # fmt: skip
            tl.store(floors_ptr + row, floor)
            tl.debug_barrier()  # the list is appended to where it was read
    tl.store(held_ptr + row, held)


@triton.jit
def _best_kernel(
    scores_ptr, ids_ptr, lengths_ptr, best_scores_ptr, best_ids_ptr, kept_ptr, floors_ptr,
    length, stride, best_stride, count, room,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if ids_ptr is not None:
        ids_ptr += row * stride
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + row)
    if best_scores_ptr is not None:
        best_scores_ptr += row * best_stride
    threshold, kept = _keep(
        scores_ptr + row * stride, ids_ptr, best_scores_ptr, best_ids_ptr + row * best_stride,
        length, count, room, BLOCK, TILE,
    )  # fmt: skip
    if kept_ptr is not None:
        tl.store(kept_ptr + row, kept)
        tl.store(floors_ptr + row, threshold)


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

    def score(
        self, rows: slice, columns: slice, out: Tensor, floors: Tensor | None, passed: Tensor
    ) -> None:
        """out [rows, >= columns] = scaled products + jitter.

        With floors [rows] only the scores that pass are written, and which do: a bit of `passed`
        [rows, >= columns / WORD] each.
        """
        left, right = self.rows[:, rows], self.columns[:, columns]
        (row_parts, num_rows, dim), (column_parts, num_columns, _) = left.shape, right.shape
        config = _product_config(num_rows, dim, row_parts * column_parts, self.float32)
        grid = triton.cdiv(num_rows, config["BLOCK_R"])
        grid *= triton.cdiv(num_columns, config["BLOCK_C"])
        _scores_kernel[(grid,)](
            left, right,
            None if self.scales is None else self.scales[columns],
            self.keys_of(rows),
            out, floors, passed, num_rows, num_columns, dim,
            left.stride(0), right.stride(0), out.stride(0), passed.stride(0),
            columns.start, self.noise_std,
            NORMALIZE=self.normalize, ROW_PARTS=row_parts, COLUMN_PARTS=column_parts,
            FLOAT32=self.float32, DIRECT=DIRECT_STORES and not interpreted(), **config,
        )  # fmt: skip


def whole(table: Tensor) -> Tensor:
    """A table as its only part: [1, N, D]."""
    return as_stored(table).unsqueeze(0)


def pieces_of(num_rows: int, num_columns: int) -> list[slice]:
    """Columns are scored a piece at a time, `num_rows` of whole tiles.

    The first piece gives the floors, so it must fit into registers; of one that is twice as long
    as all before it some 2 * count scores pass.
    """
    most = max(LONGEST_ROW, SCORE_ELEMENTS // num_rows // BLOCK_COLUMNS * BLOCK_COLUMNS)
    borders = [0, min(num_columns, LONGEST_ROW)]
    while borders[-1] < num_columns:
        borders.append(min(num_columns, borders[-1] + min(2 * borders[-1], most)))
    return [slice(*border) for border in pairwise(borders)]


class Lists:
    """For each row its best scores so far and some others, columns ascending."""

    def __init__(self, num_rows: int, count: int, device: torch.device) -> None:
        wanted = int(triton.next_power_of_2(max(LIST_COUNTS * count, LEAST_CAPACITY)))
        capacity = min(wanted, LONGEST_ROW)
        # A list that was thinned takes at least the columns of one more word.
        self.count, self.room = count, min(count + count // 8, capacity - WORD.value)
        assert self.room >= count
        shape = num_rows, capacity
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.ids = torch.empty(shape, dtype=torch.int32, device=device)
        self.held = torch.empty(num_rows, dtype=torch.int32, device=device)
        self.floors = torch.empty(num_rows, dtype=torch.float32, device=device)

    def begin(self, scores: Tensor, num_columns: int) -> None:
        """With the best of the first piece's scores [rows, >= num_columns]."""
        _best_kernel[(scores.shape[0],)](
            scores, None, None, self.scores, self.ids, self.held, self.floors,
            num_columns, scores.stride(0), self.scores.stride(0), self.count, self.room,
            **_list_config(num_columns),
        )  # fmt: skip

    def add(self, scores: Tensor, passed: Tensor, columns: slice) -> None:
        """Those of the next piece's scores whose bit is set."""
        num_words = triton.cdiv(columns.stop - columns.start, WORD.value)
        config = _list_config(self.scores.shape[1])
        _sieve_kernel[(scores.shape[0],)](
            scores, passed, self.scores, self.ids, self.held, self.floors,
            num_words, scores.stride(0), passed.stride(0), columns.start, self.count, self.room,
            CAPACITY=config.pop("BLOCK"),
            WORDS=min(MOST_WORDS, int(triton.next_power_of_2(num_words))),
            **config,
        )  # fmt: skip

    def write(self, ids: Tensor, scores: Tensor | None) -> None:
        """The `count` best of every row, ids ascending."""
        _best_kernel[(ids.shape[0],)](
            self.scores, self.ids, self.held, scores, ids, None, None,
            0, self.scores.stride(0), ids.stride(0), self.count, self.count,
            **_list_config(self.scores.shape[1]),
        )  # fmt: skip


def best_columns(tables: Tables, ids: Tensor, scores: Tensor | None = None) -> None:
    """Write the best columns of every row: ids [N, count] ascending, and scores.

    Some rows at a time, in buffers that are used again.
    """
    (num_rows, count), num_columns, device = ids.shape, tables.columns.shape[1], ids.device
    size = min(num_rows, ROWS)
    tile = _tile_rows(size)
    padded = triton.cdiv(size, tile) * tile
    first, *others = pieces_of(padded, num_columns)
    widest = max(piece.stop - piece.start for piece in (first, *others))
    blocks = triton.cdiv(widest, BLOCK_COLUMNS)
    buffer = torch.empty(padded, blocks * BLOCK_COLUMNS, dtype=torch.float32, device=device)
    passed = torch.empty(
        size, blocks * (BLOCK_COLUMNS // WORD.value), dtype=torch.int32, device=device
    )
    lists = Lists(size, count, device)
    for rows in chunks(num_rows, size):
        some = slice(0, rows.stop - rows.start)
        tables.score(rows, first, buffer[some], None, passed)
        lists.begin(buffer[some], first.stop)
        for piece in others:
            tables.score(rows, piece, buffer[some], lists.floors, passed)
            lists.add(buffer[some], passed, piece)
        lists.write(ids[rows], None if scores is None else scores[rows])


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
