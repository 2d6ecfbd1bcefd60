"""The best pairs of two halves, one (token, head) at a time in the registers of one warp.

Three selections of the same kind: the best of the first half, of the second, and of the sums of
those pairs of ranks that can be among the best. Each finds a threshold by halving an interval
(cheaper than sorting everything), lists what reaches it, and sorts only that list, by int64 keys
that hold the score and the reversed id, so that ties fall as in the reference. Lists and sorted
halves are passed through a few hundred bytes of scratch memory that each program owns; programs
take many rows, so that the scratch stays in the cache.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportAttributeAccessIssue=none, reportOperatorIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.kernels.device_triton import (
    FLOAT32_MAX,
    INFINITY,
    border,
    finite_from_above,
    last_equal,
)
from airmoe.kernels.product_keys import num_rank_pairs

MOST_PROGRAMS = 16384  # several times what a GPU holds at once, few enough for a small scratch
MAX_REGISTERS = 96  # 21 warps on an SM; without a limit the compiler takes 128
SHORTEST_SORT = 16  # a longer list needs fewer steps to find what to sort
LEAST_KEY = tl.constexpr(-(2**63))
LANES = tl.constexpr(32)  # threads of a warp


@triton.jit
def _keys(scores, low_words):
    """int64 keys in the order (score, low word), as `selection_keys` of the reference."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes -0 and 0 a tie
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | low_words.to(tl.int64)


@triton.jit
def _key_scores(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key_low_words(keys):
    return (keys & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _first_equals(scores, ids, threshold, COUNT: tl.constexpr, NUM_IDS: tl.constexpr):
    """True at the COUNT largest when the threshold has equals: those with the lowest ids."""
    last = last_equal(scores, ids, threshold, COUNT, NUM_IDS)
    return (scores > threshold) | ((scores == threshold) & (ids <= last))


@triton.jit
def _write_list(list_ptr, chosen, entries):
    """The chosen entries, one after the other, for all threads to read."""
    rows: tl.constexpr = chosen.shape[0] // LANES
    # Each thread adds up its own column, so that only the 32 totals go from thread to thread.
    ones = tl.reshape(chosen.to(tl.int32), (rows, LANES))
    totals = tl.sum(ones, axis=0)
    before = tl.cumsum(totals, axis=0) - totals
    place = tl.reshape(before[None, :] + tl.cumsum(ones, axis=0) - 1, chosen.shape)
    tl.debug_barrier()  # whoever still reads the last list
    tl.store(list_ptr + place, entries, mask=chosen)
    tl.debug_barrier()


@triton.jit
def _sort_half(
    scores_ptr, list_ptr, values_ptr, positions_ptr,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, SIDE_BLOCK: tl.constexpr, DEPTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """The DEPTH best scores of a half and their positions, best first."""
    slot = tl.arange(0, DEPTH_BLOCK)
    if SIDE <= DEPTH_BLOCK:  # nothing to leave out before the sort
        filled = slot < SIDE
        listed = slot
    else:
        # Said not to be contiguous: with one score per load, thread and row of 32 the scores lie as
        # `_write_list` wants them, and need not move between threads.
        position = tl.max_contiguous(tl.arange(0, SIDE_BLOCK), 1)
        inside = position < SIDE
        scores = finite_from_above(tl.load(scores_ptr + position, mask=inside, other=-INFINITY))
        threshold, reached = border(scores, SIDE, DEPTH, DEPTH_BLOCK)
        chosen = inside & (scores >= threshold)
        if reached > DEPTH_BLOCK:
            ids = tl.where(inside, position, SIDE)  # padding is -inf, and no equal of -inf
            chosen = _first_equals(scores, ids, threshold, DEPTH, SIDE)
            reached = DEPTH * 1.0
        _write_list(list_ptr, chosen, position)
        filled = slot < reached
        listed = tl.load(list_ptr + slot, mask=filled, other=0)
    best = finite_from_above(tl.load(scores_ptr + listed, mask=filled, other=0.0))
    keys = tl.where(filled, _keys(best, SIDE - 1 - listed), LEAST_KEY)
    keys = tl.sort(keys, descending=True)
    kept = slot < DEPTH
    tl.store(values_ptr + slot, _key_scores(keys), mask=kept)
    tl.store(positions_ptr + slot, SIDE - 1 - _key_low_words(keys), mask=kept)


@triton.jit
def _rank_pairs_kernel(pairs_ptr, COUNT: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs of ranks with (r + 1)(s + 1) <= COUNT as r << 16 | s, those of one r together."""
    place = tl.arange(0, BLOCK)
    rank_first = tl.zeros((BLOCK,), tl.int32)
    start = tl.zeros((BLOCK,), tl.int32)
    end = 0
    for rank in range(1, DEPTH):
        end += tl.minimum(COUNT // rank, DEPTH)
        beyond = place >= end
        rank_first += beyond.to(tl.int32)
        start = tl.where(beyond, end, start)
    tl.store(pairs_ptr + place, (rank_first << 16) | (place - start))


@triton.jit
def _pair_sums(values_ptr, pairs, inside, DEPTH: tl.constexpr):
    first = tl.load(values_ptr + (pairs >> 16), mask=inside, other=-INFINITY)
    second = tl.load(values_ptr + DEPTH + (pairs & 0xFFFF), mask=inside, other=-INFINITY)
    return tl.minimum(first + second, FLOAT32_MAX)  # neither is +inf or NaN


@triton.jit
def _pair_ids(positions_ptr, pairs, inside, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """Expert ids of pairs of ranks; beyond all experts where not `inside`."""
    first = tl.load(positions_ptr + (pairs >> 16), mask=inside, other=SIDE)
    second = tl.load(positions_ptr + DEPTH + (pairs & 0xFFFF), mask=inside, other=0)
    return first * SIDE + second


@triton.jit
def _sort_pairs(
    values_ptr, positions_ptr, pairs, list_ptr, out_ptr,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, COUNT: tl.constexpr,
    NUM_PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr, COUNT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Expert ids of the COUNT best sums, best first."""
    slot = tl.arange(0, COUNT_BLOCK)
    inside = tl.arange(0, PAIRS_BLOCK) < NUM_PAIRS
    sums = _pair_sums(values_ptr, pairs, inside, DEPTH)
    threshold, reached = border(sums, NUM_PAIRS, COUNT, COUNT_BLOCK)
    chosen = inside & (sums >= threshold)
    if reached > COUNT_BLOCK:
        ids = _pair_ids(positions_ptr, pairs, inside, SIDE, DEPTH)
        chosen = _first_equals(sums, ids, threshold, COUNT, SIDE * SIDE)
        reached = COUNT * 1.0
    _write_list(list_ptr, chosen, pairs)
    filled = slot < reached
    listed = tl.load(list_ptr + slot, mask=filled, other=0)
    ids = _pair_ids(positions_ptr, listed, filled, SIDE, DEPTH)
    best = _pair_sums(values_ptr, listed, filled, DEPTH)
    keys = tl.where(filled, _keys(best, SIDE * SIDE - 1 - ids), LEAST_KEY)
    keys = tl.sort(keys, descending=True)
    best_ids = SIDE * SIDE - 1 - _key_low_words(keys)
    tl.store(out_ptr + slot, best_ids.to(tl.int64), mask=slot < COUNT)


@triton.jit
def _best_pairs_kernel(
    first_ptr, second_ptr, out_ptr, pairs_ptr, lists_ptr, values_ptr, positions_ptr,
    num_rows, num_heads,
    first_token_stride, first_head_stride, second_token_stride, second_head_stride,
    SIDE: tl.constexpr, DEPTH: tl.constexpr, COUNT: tl.constexpr, NUM_PAIRS: tl.constexpr,
    SIDE_BLOCK: tl.constexpr, DEPTH_BLOCK: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr, COUNT_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    list_ptr = lists_ptr + program * COUNT_BLOCK
    pairs = tl.load(pairs_ptr + tl.max_contiguous(tl.arange(0, PAIRS_BLOCK), 1))
    # Two buffers in turn: with one, the compiler would keep the addresses of all pairs of ranks
    # from row to row, which takes more registers than the rest of the kernel.
    buffer = program * 4 * DEPTH
    next_buffer = buffer + 2 * DEPTH
    for row in range(program, num_rows, tl.num_programs(0)):
        token = (row // num_heads).to(tl.int64)
        head = (row % num_heads).to(tl.int64)
        values = values_ptr + buffer
        positions = positions_ptr + buffer
        buffer, next_buffer = next_buffer, buffer
        _sort_half(
            first_ptr + token * first_token_stride + head * first_head_stride,
            list_ptr, values, positions, SIDE, DEPTH, SIDE_BLOCK, DEPTH_BLOCK,
        )  # fmt: skip
        _sort_half(
            second_ptr + token * second_token_stride + head * second_head_stride,
            list_ptr, values + DEPTH, positions + DEPTH, SIDE, DEPTH, SIDE_BLOCK, DEPTH_BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _sort_pairs(
            values, positions, pairs, list_ptr, out_ptr + (token * num_heads + head) * COUNT,
            SIDE, DEPTH, COUNT, NUM_PAIRS, PAIRS_BLOCK, COUNT_BLOCK,
        )  # fmt: skip


def _dense_rows(scores: Tensor) -> Tensor:
    """Halves are views of one tensor with both: only the last dimension must be dense."""
    return scores if scores.stride(-1) == 1 else scores.contiguous()


def best_pairs(first: Tensor, second: Tensor, count: int) -> Tensor:
    """[T, P, side] twice -> expert ids [T, P, count], best first."""
    tokens, heads, side = first.shape
    first, second = _dense_rows(first), _dense_rows(second)
    out = torch.empty(tokens, heads, count, dtype=torch.int64, device=first.device)
    num_rows = tokens * heads
    if num_rows >= 2**31:
        raise ConfigError(
            "best_pairs", num_rows, "rows (tokens x heads) must be fewer than 2^31",
            "Route fewer tokens at a time.",
        )  # fmt: skip
    if out.numel() == 0:
        return out
    depth, num_pairs = min(count, side), num_rank_pairs(side, count)
    side_block, pairs_block = (max(32, triton.next_power_of_2(n)) for n in (side, num_pairs))
    depth_block, count_block = (
        max(SHORTEST_SORT, triton.next_power_of_2(n)) for n in (depth, count)
    )
    programs = min(num_rows, MOST_PROGRAMS)
    pairs = out.new_empty(pairs_block, dtype=torch.int32)
    lists = out.new_empty(programs, count_block, dtype=torch.int32)
    positions = out.new_empty(programs, 2, 2, depth, dtype=torch.int32)  # two buffers, two halves
    values = out.new_empty(programs, 2, 2, depth, dtype=torch.float32)
    _rank_pairs_kernel[(1,)](pairs, COUNT=count, DEPTH=depth, BLOCK=pairs_block, num_warps=4)
    _best_pairs_kernel[(programs,)](
        first, second, out, pairs, lists, values, positions, num_rows, heads,
        first.stride(0), first.stride(1), second.stride(0), second.stride(1),
        SIDE=side, DEPTH=depth, COUNT=count, NUM_PAIRS=num_pairs, SIDE_BLOCK=side_block,
        DEPTH_BLOCK=depth_block, PAIRS_BLOCK=pairs_block, COUNT_BLOCK=count_block,
        num_warps=max(1, side_block // 1024),  # one where it fits: counting needs no barrier
        num_stages=1, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out
