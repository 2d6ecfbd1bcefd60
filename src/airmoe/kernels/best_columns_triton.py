"""The best columns of a product of two tables: top-M experts of codewords or tokens.

    1. some rows times the first columns, up to 65,536 of them. A sample of each row's scores says
       above which floor a few more than `count` lie; they start the row's list, columns ascending
    2. the rows times the next columns: only scores above their row's floor are stored, with a bit
       for every score that says which
    3. a sieve reads the bits and appends those scores to the lists
    4. a list that is full is thinned to its best, and the floor rises to the least of them

After n columns only count / n of the next ones pass, so most scores never leave the chip. A few
rows would leave most of a GPU idle: parts of them are searched at once, then the best of all parts.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

from dataclasses import dataclass
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

SCORE_ELEMENTS = 1 << 24  # scores that exist at once: 64 MiB
ROWS = 256  # handled at once at least, or parts of fewer rows
FEW_ROWS = 32  # then reading the columns is all that counts
BLOCK_COLUMNS = 128  # of a tile of scores
WORD = tl.constexpr(32)  # columns that a word has bits for
MOST_WORDS = 512  # that are sieved at once
LEAST_CAPACITY = 2048  # of a list
LIST_COUNTS = 2  # capacity of a list in numbers of scores that are wanted of it
DIRECT_STORES = True  # scores that pass are written by an instruction of the assembler
LIST_REGISTERS = 64  # so that 32 warps run side by side on an SM
SELECT_TILE = 4096  # scores looked at together, and of a sample
SELECT_WARPS = 8


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
    rows_at, columns_at, row_stride, column_stride, depth, dim,
    NORMALIZE: tl.constexpr,
    ROW_PARTS: tl.constexpr, COLUMN_PARTS: tl.constexpr, FLOAT32: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] products; of parts, those pairs that reach a float32's last bit.

    To NORMALIZE columns of one part, their norms are measured as they come by. EVEN: the depth is
    a multiple of the tile's.
    """
    scores = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    squares = tl.zeros((BLOCK_D, BLOCK_C), dtype=tl.float32)
    for start in range(0, dim, BLOCK_D):
        inside = depth < dim - start
        some_rows = None if EVEN else inside[None, :]
        some_columns = None if EVEN else inside[:, None]
        other = None if EVEN else 0.0
        if FLOAT32:
            left = tl.load(rows_at + start, mask=some_rows, other=other).to(tl.float32)
            right = tl.load(columns_at + start, mask=some_columns, other=other).to(tl.float32)
            if NORMALIZE:
                squares += right * right
            scores = tl.dot(left, right, scores, input_precision="tf32x3")
        else:
            for row_part in tl.static_range(ROW_PARTS):
                left = tl.load(rows_at + row_part * row_stride + start, mask=some_rows, other=other)
                for column_part in tl.static_range(COLUMN_PARTS):
                    if row_part + column_part < 3:
                        right = tl.load(
                            columns_at + column_part * column_stride + start,
                            mask=some_columns,
                            other=other,
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
        # whole rows; here few and scattered scores are written from where they are. A thread of a
        # product holds pairs of neighbours, and writes both where one passes. "Pure" lets the
        # compiler move the stores: in a fixed order their operands do not fit into registers.
        bits = tl.inline_asm_elementwise(
            """{ .reg .pred first, second, either;
            setp.gtu.f32 first, $4, $6;
            setp.gtu.f32 second, $5, $7;
            or.pred either, first, second;
            @either st.global.v2.f32 [$2], {$4, $5};
            selp.b32 $0, $8, 0, first;
            selp.b32 $1, $9, 0, second; }""",
            "=r,=r,l,l,f,f,f,f,r,r",
            [(rows_at + column).to(tl.int64), scores, floor, bit],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
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
    EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """Scores of whole tiles, for which `out` has room; those of a row with a floor if they pass."""
    row_blocks = tl.cdiv(num_rows, BLOCK_R)
    # Neighbouring programs share their columns: the larger table is read once.
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    column_block = tl.program_id(0) // row_blocks
    column = column_block * BLOCK_C + tl.arange(0, BLOCK_C)
    # Beyond the last one the last one again: loads without masks take fewer registers.
    real_row = tl.minimum(row, num_rows - 1)
    real_column = tl.minimum(column, num_columns - 1)
    depth = tl.arange(0, BLOCK_D)
    rows_at = rows_ptr + real_row.to(tl.int64)[:, None] * dim + depth[None, :]
    columns_at = columns_ptr + real_column.to(tl.int64)[None, :] * dim + depth[:, None]
    keys = None
    if row_keys_ptr is not None:  # fetched during the product
        keys = tl.load(row_keys_ptr + real_row)
    floor = None
    if floors_ptr is not None:
        floor = tl.load(floors_ptr + real_row)
    scores = product(
        rows_at, columns_at, row_stride, column_stride, depth, dim,
        NORMALIZE, ROW_PARTS, COLUMN_PARTS, FLOAT32, EVEN, BLOCK_R, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    if scales_ptr is not None:
        scores *= tl.load(scales_ptr + column, mask=column < num_columns, other=0.0)[None, :]
    if row_keys_ptr is not None:
        scores += normal(keys[:, None], (first_column + column)[None, :]) * noise_std
    out_ptr += row.to(tl.int64)[:, None] * out_stride
    if floors_ptr is None:
        tl.store(out_ptr + column[None, :], scores)
    else:
        bit = 1 << (tl.arange(0, BLOCK_C) % WORD)
        bits = _store_passed(out_ptr, column[None, :], scores, floor[:, None], bit[None, :], DIRECT)
        words = tl.sum(tl.reshape(bits, (BLOCK_R, BLOCK_C // WORD, WORD)), axis=2)
        word = column_block * (BLOCK_C // WORD) + tl.arange(0, BLOCK_C // WORD)
        left = num_columns - word * WORD  # columns from the word on
        real = tl.where(left < WORD, (1 << tl.minimum(tl.maximum(left, 0), WORD - 1)) - 1, -1)
        words_at = passed_ptr + row.to(tl.int64)[:, None] * passed_stride + word[None, :]
        tl.store(words_at, words & real[None, :], mask=(row < num_rows)[:, None])


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
def _guess(scores_ptr, length, count, BLOCK: tl.constexpr):
    """A score that hopefully at least `count` others exceed, and not many more, by a sample."""
    # Neighbours come from memory by eights; those in the sample are spread over all columns.
    place = tl.arange(0, BLOCK)
    position = place // 8 * (length // BLOCK * 8) + place % 8
    scores = finite_from_above(tl.load(scores_ptr + position)) + 0.0
    expected = count * (BLOCK * 1.0) / length
    # Four deviations more: one row in 30,000 must be gone over again.
    wanted = tl.minimum(expected + 4 * tl.sqrt(expected) + 4, BLOCK * 1.0).to(tl.int32)
    floor, _ = border(scores, BLOCK, wanted, wanted + wanted // 8)
    return floor


@triton.jit
def _append(scores_at, ids_at, scores, ids, floor, passed, DIRECT: tl.constexpr):
    if DIRECT:  # as in `_store_passed`; comparing once more is cheaper than keeping what passed
        tl.inline_asm_elementwise(
            """{ .reg .pred passed;
            setp.gtu.f32 passed, $3, $5;
            @passed st.global.f32 [$1], $3;
            @passed st.global.b32 [$2], $4;
            mov.b32 $0, 0; }""",
            "=r,l,l,f,r,f",
            [scores_at.to(tl.int64), ids_at.to(tl.int64), scores, ids, floor],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(scores_at, scores, mask=passed)
        tl.store(ids_at, ids, mask=passed)


@triton.jit
def _gather(
    scores_ptr, ids_ptr, list_scores_ptr, list_ids_ptr, length, first_id, count, floor,
    EVERYTHING: tl.constexpr,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Write the scores above a floor, or all, to a list; returns how many it holds in the end.

    With more than CAPACITY it is thinned, and the floor rises: a tile more must fit into BLOCK.
    """
    offset = tl.arange(0, TILE)
    scores = tl.load(scores_ptr + offset, mask=offset < length, other=-INFINITY)
    held = length * 0
    for start in range(0, length, TILE):
        position = start + offset
        following = position + TILE  # on its way while this tile is dealt with
        coming = tl.load(scores_ptr + following, mask=following < length, other=-INFINITY)
        passed = (scores <= floor) == 0
        if EVERYTHING:  # that is, while the floor is NaN: -inf too, but not what is no score
            passed = passed & (position < length)
        taken = passed.to(tl.int32)
        slot = held - 1 + tl.cumsum(taken, axis=0)
        ids = first_id + position
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + position, mask=position < length, other=0)
        _append(
            list_scores_ptr + slot, list_ids_ptr + slot, scores, ids, floor, passed,
            DIRECT and not EVERYTHING,
        )  # fmt: skip
        held += tl.sum(taken, axis=0)
        scores = coming
        if held > CAPACITY:
            floor, held = _keep(
                list_scores_ptr, list_ids_ptr, list_scores_ptr, list_ids_ptr, held, count, CAPACITY,
                BLOCK, CAPACITY // 4,
            )  # fmt: skip
            tl.debug_barrier()  # the list is appended to where it was read
    return held


@triton.jit
def _select_kernel(
    scores_ptr, ids_ptr, list_scores_ptr, list_ids_ptr, best_scores_ptr, best_ids_ptr,
    kept_ptr, floors_ptr, length, stride, list_stride, best_stride, first_column, count, room,
    CAPACITY: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The best scores of a long row, or of each of its parts: at least `count`, at most `room`.

    Those above a guessed floor go to a list. Where fewer than `count` are above, all go there.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    begin = (part.to(tl.int64) * length // parts // 16 * 16).to(tl.int32)
    end = ((part + 1).to(tl.int64) * length // parts // 16 * 16).to(tl.int32)
    length = tl.where(part == parts - 1, length, end) - begin
    scores_ptr += row * stride + begin
    if ids_ptr is not None:
        ids_ptr += row * stride + begin
    list_scores_ptr += (row * parts + part) * list_stride
    list_ids_ptr += (row * parts + part) * list_stride
    if best_scores_ptr is not None:
        best_scores_ptr += row * best_stride + part * count
    floor = _guess(scores_ptr, length, count, TILE)
    first_id = first_column + begin
    held = _gather(
        scores_ptr, ids_ptr, list_scores_ptr, list_ids_ptr, length, first_id, count, floor,
        False, CAPACITY, TILE, BLOCK, DIRECT,
    )  # fmt: skip
    if held < count:
        tl.debug_barrier()
        floor = tl.full((), float("nan"), tl.float32)
        held = _gather(
            scores_ptr, ids_ptr, list_scores_ptr, list_ids_ptr, length, first_id, count, floor,
            True, CAPACITY, TILE, BLOCK, DIRECT,
        )  # fmt: skip
    threshold, kept = _keep(
        list_scores_ptr, list_ids_ptr, best_scores_ptr,
        best_ids_ptr + row * best_stride + part * count, held, count, room,
        CAPACITY, CAPACITY // 4,
    )  # fmt: skip
    if kept_ptr is not None:
        tl.store(kept_ptr + row, kept)
        tl.store(floors_ptr + row, threshold)


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
        self, rows: slice, columns: slice, out: Tensor, floors: Tensor | None, passed: Tensor | None
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
            left.stride(0), right.stride(0), out.stride(0),
            0 if passed is None else passed.stride(0), columns.start, self.noise_std,
            NORMALIZE=self.normalize, ROW_PARTS=row_parts, COLUMN_PARTS=column_parts,
            FLOAT32=self.float32, EVEN=dim % config["BLOCK_D"] == 0,
            DIRECT=DIRECT_STORES and not interpreted(), **config,
        )  # fmt: skip


def whole(table: Tensor) -> Tensor:
    """A table as its only part: [1, N, D]."""
    return as_stored(table).unsqueeze(0)


def pieces_of(num_rows: int, num_columns: int) -> list[slice]:
    """Columns are scored a piece at a time, `num_rows` of whole tiles; the pieces are about equal.

    The first is not shorter than any list.
    """
    most = max(LONGEST_ROW, SCORE_ELEMENTS // num_rows // BLOCK_COLUMNS * BLOCK_COLUMNS)
    even = triton.cdiv(num_columns, triton.cdiv(num_columns, most))
    width = max(LONGEST_ROW, triton.cdiv(even, BLOCK_COLUMNS) * BLOCK_COLUMNS)
    return list(chunks(num_columns, width))


@dataclass(frozen=True)
class Scores:
    """Scores to choose from, rows of a buffer."""

    values: Tensor  # [rows, >= columns]
    columns: slice  # whose they are
    ids: Tensor | None = None  # [rows, columns], if they are not the columns


@dataclass(frozen=True)
class Best:
    """Where chosen scores go: at least `count` of each row, exactly so many without `held`."""

    ids: Tensor  # [rows, >= count], ascending
    scores: Tensor | None
    held: Tensor | None = None  # [rows] how many they are
    floors: Tensor | None = None  # [rows] which `count` of them reach
    room: int = 0  # for so many, with `held`


def _capacity(count: int) -> int:
    wanted = int(triton.next_power_of_2(max(LIST_COUNTS * count, LEAST_CAPACITY)))
    return min(wanted, LONGEST_ROW)


def _select(scores: Scores, count: int, best: Best, parts: int = 1) -> None:
    """Write the best of each row, or of each of its parts: [rows, parts * count]."""
    values, columns = scores.values, scores.columns
    num_rows, length = values.shape[0], columns.stop - columns.start
    room = count if best.held is None else best.room
    if parts == 1 and length <= min(LONGEST_ROW, max(4 * count, 2 * SELECT_TILE)):
        assert columns.start == 0
        _best_kernel[(num_rows,)](
            values, scores.ids, None, best.scores, best.ids, best.held, best.floors,
            length, values.stride(0), best.ids.stride(0), count, room, **_list_config(length),
        )  # fmt: skip
        return
    capacity = _capacity(count)
    shape = num_rows * parts, capacity + SELECT_TILE
    list_scores = torch.empty(shape, dtype=torch.float32, device=values.device)
    list_ids = torch.empty(shape, dtype=torch.int32, device=values.device)
    _select_kernel[(num_rows, parts)](
        values, scores.ids, list_scores, list_ids, best.scores, best.ids, best.held, best.floors,
        length, values.stride(0), shape[1], best.ids.stride(0), columns.start, count, room,
        CAPACITY=capacity, TILE=SELECT_TILE,
        BLOCK=int(triton.next_power_of_2(capacity + SELECT_TILE)),
        DIRECT=DIRECT_STORES and not interpreted(), num_warps=max(SELECT_WARPS, capacity // 1024),
        maxnreg=128,
    )  # fmt: skip


class Lists:
    """For each row its best scores so far and some others, columns ascending."""

    def __init__(self, num_rows: int, count: int, device: torch.device) -> None:
        capacity = _capacity(count)
        # A list that was thinned takes at least the columns of one more word.
        self.count, self.room = count, min(count + count // 8, capacity - WORD.value)
        assert self.room >= count
        shape = num_rows, capacity
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.ids = torch.empty(shape, dtype=torch.int32, device=device)
        self.held = torch.empty(num_rows, dtype=torch.int32, device=device)
        self.floors = torch.empty(num_rows, dtype=torch.float32, device=device)

    def begin(self, scores: Tensor, columns: slice) -> None:
        """With the best of the first piece's scores [rows, >= columns]."""
        best = Best(self.ids, self.scores, self.held, self.floors, self.room)
        _select(Scores(scores, columns), self.count, best)

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
    size = min(num_rows, max(ROWS, SCORE_ELEMENTS // num_columns))
    tile = _tile_rows(size)
    padded = triton.cdiv(size, tile) * tile
    pieces = pieces_of(padded, num_columns)
    blocks = triton.cdiv(pieces[0].stop, BLOCK_COLUMNS)
    buffer = torch.empty(padded, blocks * BLOCK_COLUMNS, dtype=torch.float32, device=device)
    shortest = num_columns - pieces[-1].start
    parts = min(ROWS // size, shortest // max(4 * count, 4 * SELECT_TILE))
    if parts > 1:
        _best_of_parts(tables, ids, scores, buffer, pieces, parts)
        return
    first, *others = pieces
    words = blocks * (BLOCK_COLUMNS // WORD.value) if others else 0
    passed = torch.empty(size, words, dtype=torch.int32, device=device)
    lists = Lists(size if others else 0, count, device)
    for rows in chunks(num_rows, size):
        some = buffer[: rows.stop - rows.start]
        best = Best(ids[rows], None if scores is None else scores[rows])
        tables.score(rows, first, some, None, None)
        if not others:
            _select(Scores(some, first), count, best)
            continue
        lists.begin(some, first)
        for piece in others:
            tables.score(rows, piece, some, lists.floors, passed)
            lists.add(some, passed, piece)
        lists.write(best.ids, best.scores)


def _best_of_parts(
    tables: Tables,
    ids: Tensor,
    scores: Tensor | None,
    buffer: Tensor,
    pieces: list[slice],
    parts: int,
) -> None:
    """A few rows: the best of each part are candidates, then the best of them.

    Candidates stand in the order of their ids, so a tie between them goes to the lowest id.
    """
    (num_rows, count), device = ids.shape, ids.device
    width, most = parts * count, len(pieces) * parts * count
    found_ids = torch.empty(num_rows, most, dtype=torch.int32, device=device)
    found_scores = torch.empty(num_rows, most, dtype=torch.float32, device=device)
    buffer = buffer[:num_rows]
    for number, piece in enumerate(pieces):
        tables.score(slice(0, num_rows), piece, buffer, None, None)
        mine = slice(number * width, (number + 1) * width)
        found = Best(found_ids[:, mine], found_scores[:, mine])
        _select(Scores(buffer, piece), count, found, parts)
    _select(Scores(found_scores, slice(0, most), found_ids), count, Best(ids, scores))


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
