"""Each row's best columns of a large product, whose scores never leave the chip.

A program keeps a block of rows and runs over all columns. Scores that beat a row's floor are
appended to a short list of that row, columns ascending; how many precede each of them in its tile
is a product with a triangle of ones. Every SPAN columns the lists that might overflow are thinned
to about `count`, and the floor rises to the least score kept: after n columns only count / n of
the next ones pass, so lists are thinned about log2(columns / SPAN) times.

Lists hold scores without jitter. It is at most JITTER_BOUND deviations, so the floor lies that much
below the least jittered score kept, and only what passes is ever jittered.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none, reportReturnType=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import chunks, interpreted
from airmoe.kernels.best_columns_triton import Tables, product
from airmoe.kernels.device_triton import FLOAT32_MAX, INFINITY
from airmoe.kernels.noise_triton import normal

SPAN = 1024  # columns between two looks at the lists
ROW_BLOCKS = 132  # blocks of rows per launch: each takes a multiprocessor, lists are used again
THIN_ELEMENTS = 1024  # list entries per warp thinned together: twice as many do not fit in
LEAST_ROWS = 4096  # below, a block of rows for every multiprocessor would be too thin
LARGEST_COUNT = 2048
RESIDENT_DIM = 256  # up to here a block of rows stays in shared memory
UNPACK_BLOCK = 1024
DIRECT_STORES = True  # candidates are written by one instruction of the assembler
# The largest radius of `noise.normal`, sqrt(-2 ln(2^-17)) = 4.8546, and room for rounding.
JITTER_BOUND = tl.constexpr(4.86)
TWO_23 = tl.constexpr(8388608.0)
TWO_23_BITS = tl.constexpr(0x4B000000)


def _config(rows: int, dim: int, products: int, float32: bool) -> dict[str, int]:
    block_rows = 128 if rows > 64 * ROW_BLOCKS else 64
    depth = max(16, triton.next_power_of_2(dim))
    resident = products == 1 and not float32 and dim <= RESIDENT_DIM
    if not resident:
        depth = min(32 if float32 or products > 1 else 64, depth)
    return {
        "BLOCK_R": block_rows, "BLOCK_C": 64 if resident else 128, "BLOCK_D": depth,
        "RESIDENT": resident,
        "num_warps": block_rows // 16, "num_stages": 3 if products == 1 else 2,
    }  # fmt: skip


@triton.jit
def _selection_scores(keys, row_keys, noise_std):
    """Finite float32 scores, jittered, of packed (score, column) entries."""
    scores = (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if row_keys is not None:
        scores += normal(row_keys, keys.to(tl.int32)) * noise_std
    scores = tl.where(scores == scores, scores, FLOAT32_MAX)  # NaN counts as the largest number
    return tl.minimum(tl.maximum(scores, -FLOAT32_MAX), FLOAT32_MAX) + 0.0  # -0 and 0 are a tie


@triton.jit
def _count(chosen):
    return tl.sum(chosen.to(tl.float32), axis=1)


@triton.jit
def _thin_lists(
    keys_ptr, held_ptr, floors_ptr, row_keys_ptr, row, num_rows, noise_std, count, most,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Keep `count` to `most` best of each list; of equal ones at the border those that come first.

    As in `device_triton.largest`: halve the interval between least and greatest score until few
    enough reach the middle. Lists of at most `most` entries stay as they are.
    """
    position = tl.arange(0, CAPACITY)[None, :]
    length = tl.load(held_ptr + row)
    places = keys_ptr + row.to(tl.int64)[:, None] * CAPACITY + position
    real = position < length[:, None]
    keys = tl.load(places, mask=real, other=0)
    row_keys = None
    if row_keys_ptr is not None:
        row_keys = tl.load(row_keys_ptr + row, mask=row < num_rows, other=0)[:, None]
    scores = _selection_scores(keys, row_keys, noise_std)
    scores = tl.where(real, scores, -INFINITY)
    low = tl.min(tl.where(real, scores, FLOAT32_MAX), axis=1)
    high = tl.max(scores, axis=1)
    reached = length.to(tl.float32)  # so many scores are at least `low`
    middle = 0.5 * low + 0.5 * high
    open_ends = (reached > most) & (middle > low) & (middle < high)
    while tl.max(open_ends.to(tl.int32), axis=0) > 0:
        number = _count(scores >= middle[:, None])
        enough = open_ends & (number >= count)
        reached = tl.where(enough, number, reached)
        high = tl.where(open_ends & (number < count), middle, high)
        low = tl.where(enough, middle, low)
        middle = 0.5 * low + 0.5 * high
        open_ends = (reached > most) & (middle > low) & (middle < high)
    chosen = scores >= low[:, None]
    ties = reached > most  # `low` and `high` are neighbours: the border runs through equal scores
    if tl.max(ties.to(tl.int32), axis=0) > 0:
        low = tl.where(ties & (_count(scores >= high[:, None]) >= count), high, low)
        above = scores > low[:, None]
        equal = scores == low[:, None]
        room = (count - _count(above)).to(tl.int32)
        early = equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= room[:, None])
        chosen = tl.where(ties[:, None], above | early, chosen)
    chosen = chosen & real
    taken = chosen.to(tl.int32)
    slot = tl.cumsum(taken, axis=1) - 1
    tl.debug_barrier()  # the list is written where it was read
    tl.store(keys_ptr + row.to(tl.int64)[:, None] * CAPACITY + slot, keys, mask=chosen)
    kept = tl.sum(taken, axis=1)
    tl.store(held_ptr + row, kept)
    floor = low if row_keys_ptr is None else low - JITTER_BOUND * noise_std
    # A list that never overflowed may be shorter than `count`: everything still passes.
    floor = tl.where(kept >= count, floor, float("nan"))
    tl.store(floors_ptr + row, floor)


@triton.jit
def _append(places, scores, floor, column, DIRECT: tl.constexpr):
    """Write packed (score, column) entries of the scores that are not at most their floor."""
    if DIRECT:
        # tl.store would first move all of it, through shared memory, into the layout that suits
        # whole rows; here few and scattered entries are written from where they are.
        tl.inline_asm_elementwise(
            """{ .reg .pred p;
            setp.gtu.f32 p, $3, $4;
            @p st.global.v2.b32 [$1], {$2, $3};
            mov.b32 $0, 0; }""",
            "=r,l,r,f,f",
            [places.to(tl.int64), column, scores, floor],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(places, (bits << 32) | column.to(tl.int64), mask=(scores <= floor) == 0)


@triton.jit
def _stream_kernel(
    rows_ptr, columns_ptr, scales_ptr, row_keys_ptr, keys_ptr, held_ptr, floors_ptr,
    num_rows, num_columns, dim, row_stride, column_stride, noise_std, count, slack,
    ROW_PARTS: tl.constexpr, COLUMN_PARTS: tl.constexpr, FLOAT32: tl.constexpr,
    RESIDENT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr, CAPACITY: tl.constexpr, GROUP: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = tl.arange(0, BLOCK_C)
    depth = tl.arange(0, BLOCK_D)
    real_row = row < num_rows
    inside = depth < dim
    some_row = tl.minimum(row, num_rows - 1)
    rows_at = rows_ptr + some_row.to(tl.int64)[:, None] * dim + depth[None, :]
    # Counts ride on 2^23: the bits of such a float are a whole number, so no conversion is needed.
    list_at = keys_ptr + (row.to(tl.int64)[:, None] * CAPACITY - TWO_23_BITS - 1)
    so_far = (lane[:, None] <= lane[None, :]).to(tl.float16)  # counts of at most 128 are exact
    left = tl.zeros((BLOCK_R, BLOCK_D), rows_ptr.dtype.element_ty)
    if RESIDENT:
        left = tl.load(rows_at, mask=real_row[:, None] & inside[None, :], other=0.0)
    held = tl.full((BLOCK_R,), TWO_23, tl.float32)
    floor = tl.full((BLOCK_R,), float("nan"), tl.float32)  # nothing is below it
    for first in range(0, num_columns, SPAN):
        last = tl.minimum(first + SPAN, num_columns)
        for start in range(first, last, BLOCK_C):
            column = start + lane
            real_column = (column < num_columns)[None, :]
            some_column = tl.minimum(column, num_columns - 1)
            columns_at = columns_ptr + some_column.to(tl.int64)[None, :] * dim + depth[:, None]
            if RESIDENT:
                mask = None if EVEN else real_column & inside[:, None]
                right = tl.load(columns_at, mask=mask, other=None if EVEN else 0.0)
                scores = tl.dot(left, right)
            else:
                scores = product(
                    rows_at, columns_at, row_stride, column_stride, depth, dim, False,
                    ROW_PARTS, COLUMN_PARTS, FLOAT32, EVEN, BLOCK_R, BLOCK_C, BLOCK_D,
                )  # fmt: skip
            if scales_ptr is not None:
                mask = None if EVEN else column < last
                scale = tl.load(scales_ptr + column, mask=mask, other=None if EVEN else 0.0)
                scores *= scale[None, :]
            bar = tl.broadcast_to(floor[:, None], (BLOCK_R, BLOCK_C))
            if not EVEN:  # columns that are none must not pass, whatever the row is
                scores = tl.where(real_column, scores, -INFINITY)
                bar = tl.where(real_column, bar, INFINITY)
            passed = tl.where((scores <= bar) == 0, 1.0, 0.0).to(tl.float16)  # NaN passes
            before = tl.broadcast_to(held[:, None], (BLOCK_R, BLOCK_C))
            number = tl.dot(passed, so_far, before)
            places = list_at + number.to(tl.int32, bitcast=True)
            columns = tl.broadcast_to(column[None, :], (BLOCK_R, BLOCK_C))
            _append(places, scores, bar, columns, DIRECT)
            held = tl.max(number, axis=1)
        at_end = last == num_columns
        full = tl.where(at_end, count, CAPACITY - SPAN)  # the next columns might not fit in
        most = tl.where(at_end, count, count + slack)
        lengths = held.to(tl.int32, bitcast=True) - TWO_23_BITS
        if tl.max(lengths, axis=0) > full:
            tl.store(held_ptr + row, lengths)
            tl.store(floors_ptr + row, floor)
            tl.debug_barrier()  # what other threads appended
            for group in range(0, BLOCK_R, GROUP):
                some = tl.program_id(0) * BLOCK_R + group + tl.arange(0, GROUP)
                if tl.max(tl.load(held_ptr + some), axis=0) > full:
                    _thin_lists(
                        keys_ptr, held_ptr, floors_ptr, row_keys_ptr, some, num_rows, noise_std,
                        count, most, CAPACITY,
                    )  # fmt: skip
            tl.debug_barrier()
            held = tl.load(held_ptr + row).to(tl.float32) + TWO_23
            floor = tl.load(floors_ptr + row)


@triton.jit
def _unpack_kernel(
    keys_ptr, row_keys_ptr, ids_ptr, scores_ptr, count, capacity, noise_std, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = slot < count
    keys = tl.load(keys_ptr + row * capacity + slot, mask=mask, other=0)
    ids = (keys & 0x7FFFFFFF).to(ids_ptr.dtype.element_ty)
    tl.store(ids_ptr + row * count + slot, ids, mask=mask)
    if scores_ptr is not None:
        row_key = None if row_keys_ptr is None else tl.load(row_keys_ptr + row)
        scores = _selection_scores(keys, row_key, noise_std)
        tl.store(scores_ptr + row * count + slot, scores, mask=mask)


def can_stream(num_rows: int, num_columns: int, count: int) -> bool:
    """True where the lists of a stream are short beside the columns, and rows fill the device."""
    short = count <= LARGEST_COUNT and num_columns >= 2 * _capacity(count)
    return short and num_rows >= LEAST_ROWS


def _capacity(count: int) -> int:
    return triton.next_power_of_2(2 * count + SPAN)


def stream_columns(tables: Tables, ids: Tensor, scores: Tensor | None = None) -> None:
    """Write the best columns of every row: ids [N, count] ascending, and scores.

    Some rows at a time, in lists that are used again.
    """
    assert not tables.normalize, "norms come as scales: they would be measured in every block"
    (num_rows, count), device = ids.shape, ids.device
    capacity, noise_std = _capacity(count), tables.noise_std
    row_parts, (column_parts, num_columns, dim) = tables.rows.shape[0], tables.columns.shape
    config = _config(num_rows, dim, row_parts * column_parts, tables.float32)
    block_rows = config["BLOCK_R"]
    step = min(ROW_BLOCKS, triton.cdiv(num_rows, block_rows)) * block_rows
    keys = torch.empty(step, capacity, dtype=torch.int64, device=device)
    held = torch.empty(step, dtype=torch.int32, device=device)
    floors = torch.empty(step, dtype=torch.float32, device=device)
    group = max(1, min(THIN_ELEMENTS * config["num_warps"] // capacity, block_rows))
    block = min(UNPACK_BLOCK, triton.next_power_of_2(count))
    for rows in chunks(num_rows, step):
        left, row_keys = tables.rows[:, rows], tables.keys_of(rows)
        size = left.shape[1]
        _stream_kernel[(triton.cdiv(size, block_rows),)](
            left, tables.columns, tables.scales, row_keys, keys, held, floors,
            size, num_columns, dim, left.stride(0), tables.columns.stride(0), noise_std,
            count, count // 8,
            ROW_PARTS=row_parts, COLUMN_PARTS=column_parts, FLOAT32=tables.float32,
            EVEN=num_columns % config["BLOCK_C"] == 0 and dim % config["BLOCK_D"] == 0,
            SPAN=SPAN, CAPACITY=capacity, GROUP=group,
            DIRECT=DIRECT_STORES and not interpreted(), **config,
        )  # fmt: skip
        _unpack_kernel[(size, triton.cdiv(count, block))](
            keys, row_keys, ids[rows], None if scores is None else scores[rows],
            count, capacity, noise_std, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
