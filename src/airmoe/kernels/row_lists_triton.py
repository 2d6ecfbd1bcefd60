"""The best scores of each row: chosen from a whole row, or gathered piece by piece in lists.

A whole row: a sample of its scores says above which floor a few more than `count` lie. They are
appended to a list, which is thinned to its best where it is full, so that the floor rises. If too
few lie above it, the row is gone over again without one.

Pieces: the list starts with the best of the first. Of the next ones only scores above the floor
were stored, with a bit for every score that says which; a sieve reads the bits.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportGeneralTypeIssues=none
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import interpreted
from airmoe.kernels.device_triton import INFINITY, border, finite_from_above, last_equal
from airmoe.kernels.top_k import LONGEST_ROW

WORD = tl.constexpr(32)  # columns that a word has bits for
MOST_WORDS = 512  # that are sieved at once
LEAST_CAPACITY = 2048  # of a list
LIST_COUNTS = 2  # capacity of a list in numbers of scores that are wanted of it
LIST_REGISTERS = 64  # so that 32 warps run side by side on an SM
SELECT_TILE = 4096  # scores looked at together, and of a sample
SELECT_WARPS = 8
DIRECT_STORES = True  # scores that pass are written by an instruction of the assembler


def _list_config(length: int) -> dict[str, int]:
    """For a program that keeps so many scores in registers."""
    block = max(int(triton.next_power_of_2(length)), 32)
    return {
        "BLOCK": block, "TILE": max(block // 4, 32),
        "num_warps": max(2, block // 1024), "maxnreg": LIST_REGISTERS,
    }  # fmt: skip


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


def select(scores: Scores, count: int, best: Best, parts: int = 1) -> None:
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
        select(Scores(scores, columns), self.count, best)

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
