"""The best columns of a product of two tables, tile by tile: top-M experts of codewords or tokens.

    1. some rows times some columns: float32 scores in a buffer that stays in the cache
    2. every row is cut into segments of at most 16,384 scores; a program holds one in registers
       and writes its `count` best, ids ascending, as candidates
    3. the candidates of all segments are cut and thinned again, until one segment is left

Every score is written once and read twice. Candidates stand in the order of their ids, so a tie
between positions is a tie between ids. `best_experts_triton` uses the same, with a few
tokens as rows.
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
from airmoe.kernels.top_k_triton import MAX_REGISTERS, row_warps

SEGMENT = LONGEST_ROW
SCORE_ELEMENTS = 1 << 23  # scores that exist at once: 32 MiB
CANDIDATE_ELEMENTS = 1 << 22  # candidates that exist at once (or 16 per column, if that is more)
ROWS = 512  # rows handled together at least, where there are so many


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
    """What tells the `count` largest of a segment from the others; see `largest`."""
    position = tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + position, mask=position < length, other=-INFINITY)
    return largest(finite_from_above(scores), position, length, count, BLOCK)


@triton.jit
def _segment_kernel(
    scores_ptr, ids_ptr, best_scores_ptr, best_ids_ptr, num_columns, width, score_stride,
    best_stride, first_id, count, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * width
    length = tl.minimum(width, num_columns - first)
    scores_ptr += row * score_stride + first
    threshold, last = _border(scores_ptr, length, count, BLOCK)
    next_slot = row * best_stride + tl.program_id(1) * count
    # What was in registers is read again: the slots of all scores would not fit beside them.
    for start in range(0, length, TILE):
        position = start + tl.arange(0, TILE)
        scores = tl.load(scores_ptr + position, mask=position < length, other=-INFINITY)
        scores = finite_from_above(scores)
        chosen = (scores > threshold) | ((scores == threshold) & (position <= last))
        taken = chosen.to(tl.int32)
        slot = next_slot - 1 + tl.cumsum(taken, axis=0)
        ids = first_id + first + position
        if ids_ptr is not None:
            ids = tl.load(ids_ptr + row * score_stride + first + position, mask=chosen, other=0)
        tl.store(best_ids_ptr + slot, ids.to(best_ids_ptr.dtype.element_ty), mask=chosen)
        if best_scores_ptr is not None:
            tl.store(best_scores_ptr + slot, scores + 0.0, mask=chosen)  # -0 and 0 are a tie
        next_slot += tl.sum(taken, axis=0)


@dataclass(frozen=True)
class Cut:
    """A row of `columns` in segments of equal `width`, the last one shorter."""

    columns: int
    segments: int
    width: int


def cut_row(columns: int) -> Cut:
    segments = triton.cdiv(columns, SEGMENT)
    width = triton.cdiv(triton.cdiv(columns, segments), 16) * 16  # aligned rows load faster
    return Cut(columns, segments, width)


def plan_cuts(columns: int, count: int) -> list[Cut] | None:
    """How the columns are thinned to `count`, or None where segments would be too short."""
    cuts = [cut_row(columns)]
    while cuts[-1].segments > 1:
        cut = cuts[-1]
        # Twice as many as are kept, or thinning would not end; `count` in the last one too.
        if cut.width < 2 * count or cut.columns - (cut.segments - 1) * cut.width < count:
            return None
        cuts.append(cut_row(cut.segments * count))
    return cuts


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


def best_columns(tables: Tables, ids: Tensor, scores: Tensor | None = None) -> None:
    """Write the best columns of every row: ids [N, count] ascending, and scores.

    Some rows at a time, in buffers that are used again.
    """
    (num_rows, count), device = ids.shape, ids.device
    cuts = plan_cuts(tables.columns.shape[1], count)
    assert cuts is not None, "the caller checks that lists are short enough"
    first = cuts[0]
    step, segments = _sizes(num_rows, count, first)
    buffer = torch.empty(step, segments * first.width, dtype=torch.float32, device=device)
    candidates = [
        tuple(
            torch.empty(step, cut.segments * count, dtype=dtype, device=device)
            for dtype in (torch.float32, torch.int32)
        )
        for cut in cuts[:-1]
    ]
    for rows in chunks(num_rows, step):
        size = rows.stop - rows.start
        levels = [*candidates, (None if scores is None else scores[rows], ids[rows])]
        for segment in range(0, first.segments, segments):
            stop = min((segment + segments) * first.width, first.columns)
            columns = slice(segment * first.width, stop)
            tables.score(rows, columns, buffer)
            found = (each if each is None else each[:, segment * count :] for each in levels[0])
            _thin(buffer, None, size, columns, first.width, count, *found)
        for (source, found), cut in zip(pairwise(levels), cuts[1:], strict=True):
            _thin(*source, size, slice(0, cut.columns), cut.width, count, *found)


def _sizes(num_rows: int, count: int, first: Cut) -> tuple[int, int]:
    """Rows, and segments of them, whose scores exist at once."""
    candidates = max(CANDIDATE_ELEMENTS, 16 * first.columns) // (first.segments * count)
    wanted = min(num_rows, max(ROWS, SCORE_ELEMENTS // first.columns))
    rows = max(1, min(wanted, candidates if first.segments > 1 else wanted))
    return rows, max(1, min(SCORE_ELEMENTS // (rows * first.width), first.segments))


def _thin(
    scores: Tensor,
    ids: Tensor | None,
    num_rows: int,
    columns: slice,
    width: int,
    count: int,
    best_scores: Tensor | None,
    best_ids: Tensor,
) -> None:
    """Keep the `count` best of every segment; without `ids` those of `columns` are meant."""
    num_columns = columns.stop - columns.start
    block = triton.next_power_of_2(width)
    _segment_kernel[(num_rows, triton.cdiv(num_columns, width))](
        scores, ids, best_scores, best_ids, num_columns, width,
        scores.stride(0), best_ids.stride(0), columns.start, count,
        BLOCK=block, TILE=max(16, block // 4), num_warps=row_warps(block), maxnreg=MAX_REGISTERS,
    )  # fmt: skip


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
