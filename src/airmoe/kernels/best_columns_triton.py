"""The best columns of a product of two tables: top-M experts of codewords or tokens.

    1. some rows times the first columns (65,536 for 256 rows): the best start each row's list, and
       the least of these is the row's floor
    2. the rows times the next columns: only scores above their row's floor are stored, with a bit
       for every score that says which
    3. a sieve reads the bits and appends those scores to the lists, where the floors rise

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

from airmoe.kernels import row_lists_triton as row_lists
from airmoe.kernels.backend import chunks, interpreted
from airmoe.kernels.device_triton import (
    as_stored,
    bfloat16_parts,
    block_size,
    inverse_root,
)
from airmoe.kernels.noise_triton import normal
from airmoe.kernels.row_lists_triton import WORD, Best, Lists, Scores, select
from airmoe.kernels.top_k import LONGEST_ROW

SCORE_ELEMENTS = 1 << 24  # scores that exist at once: 64 MiB
ROWS = 256  # handled at once at least; fewer rows are cut into so many parts in all
FEW_ROWS = 32  # then reading the columns is all that counts
BLOCK_COLUMNS = 128  # of a tile of scores


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
            DIRECT=row_lists.DIRECT_STORES and not interpreted(), **config,
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


def best_columns(tables: Tables, ids: Tensor, scores: Tensor | None = None) -> None:
    """Write the best columns of every row: ids [N, count] ascending, and scores.

    Some rows at a time, in buffers that are used again.
    """
    (num_rows, count), num_columns, device = ids.shape, tables.columns.shape[1], ids.device
    size = min(num_rows, max(ROWS, SCORE_ELEMENTS // max(num_columns, BLOCK_COLUMNS)))
    tile = _tile_rows(size)
    padded = triton.cdiv(size, tile) * tile
    pieces = pieces_of(padded, num_columns)
    blocks = triton.cdiv(pieces[0].stop, BLOCK_COLUMNS)
    buffer = torch.empty(padded, blocks * BLOCK_COLUMNS, dtype=torch.float32, device=device)
    shortest = num_columns - pieces[-1].start
    parts = min(ROWS // size, shortest // max(4 * count, 4 * row_lists.SELECT_TILE))
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
            select(Scores(some, first), count, best)
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
        select(Scores(buffer, piece), count, found, parts)
    select(Scores(found_scores, slice(0, most), found_ids), count, Best(ids, scores))


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
