"""Kernels of `softmax_summary_triton`: chunks of scores [tokens, E] in whole tiles, and their sums.

Float32 numbers are cut into three bfloat16 parts, which add up to them exactly, for the matrix
units. Products of parts are taken of a block of the depth and added up outside of the matrix units,
for those cut off what they add.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none, reportOperatorIssue=none
from __future__ import annotations

import triton
import triton.language as tl

from airmoe.kernels.device_triton import FLOAT32_MAX, INFINITY, cut, load_rows, store_rows
from airmoe.kernels.noise_triton import normal


@triton.jit
def _load_parts(
    at, stride, mask, PARTS: tl.constexpr, CUT: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """The three parts of a tile: as they are stored, or cut out of it. Absent ones repeat one.

    The mask is None where all of the tile is there.
    """
    other = None if mask is None else 0.0
    first = tl.load(at, mask=mask, other=other)
    second, third = first, first
    if CUT:
        first, second, third = cut(first.to(tl.float32), PART)
    elif PARTS == 3:
        second = tl.load(at + stride, mask=mask, other=other)
        third = tl.load(at + 2 * stride, mask=mask, other=other)
    return first, second, third


@triton.jit
def _product(
    left_1, left_2, left_3, right_1, right_2, right_3,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Of LEFT x RIGHT parts the pairs that matter, the small ones first.

    With REACH 3 what a float32's last bit needs, with REACH 2 what 16 bits need.
    """
    product = tl.zeros((left_1.shape[0], right_1.shape[1]), tl.float32)
    if REACH == 3:
        if LEFT == 3:
            product = tl.dot(left_3, right_1, product)
        if RIGHT == 3:
            product = tl.dot(left_1, right_3, product)
        if LEFT > 1 and RIGHT > 1:
            product = tl.dot(left_2, right_2, product)
    if LEFT > 1:
        product = tl.dot(left_2, right_1, product)
    if RIGHT > 1:
        product = tl.dot(left_1, right_2, product)
    return tl.dot(left_1, right_1, product)


@triton.jit
def _scores(
    hidden, experts, scales, row_keys, row, column, num_tokens, num_experts, dim,
    hidden_stride, expert_stride, noise_std,
    DIM: tl.constexpr, HIDDEN_PARTS: tl.constexpr, EXPERT_PARTS: tl.constexpr,
    HIDDEN_CUT: tl.constexpr, EXPERT_CUT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """[BLOCK_R, BLOCK_C] scores. Rows and columns that are none repeat the last one."""
    # No masks but at the end of the depth: they would stand in the way of wide copies.
    row = tl.minimum(row, num_tokens - 1)
    column = tl.minimum(column, num_experts - 1)
    depth = tl.arange(0, BLOCK_D)
    rows_at = hidden + row.to(tl.int64)[:, None] * DIM + depth[None, :]
    columns_at = experts + column.to(tl.int64)[None, :] * DIM + depth[:, None]
    scores = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, dim, BLOCK_D):  # not DIM: unrolled it would not fit into registers
        inside = depth < DIM - start
        left_mask = None if DIM % BLOCK_D == 0 else inside[None, :]
        right_mask = None if DIM % BLOCK_D == 0 else inside[:, None]
        left_1, left_2, left_3 = _load_parts(
            rows_at + start, hidden_stride, left_mask, HIDDEN_PARTS, HIDDEN_CUT, PART
        )
        right_1, right_2, right_3 = _load_parts(
            columns_at + start, expert_stride, right_mask, EXPERT_PARTS, EXPERT_CUT, PART
        )
        scores += _product(
            left_1, left_2, left_3, right_1, right_2, right_3, HIDDEN_PARTS, EXPERT_PARTS, 3
        )
    if scales is not None:
        scores *= tl.load(scales + column)[None, :]
    if row_keys is not None:
        keys = tl.load(row_keys + row)
        scores += normal(keys[:, None], column[None, :]) * noise_std
    return scores


@triton.jit
def tile_kernel(
    hidden, experts, scales, row_keys, log_z, grad_mean, chunk, tile_sums, tile_peaks,
    num_tokens, num_experts, dim, hidden_stride, expert_stride, chunk_stride, noise_std,
    DIM: tl.constexpr, HIDDEN_PARTS: tl.constexpr, EXPERT_PARTS: tl.constexpr,
    HIDDEN_CUT: tl.constexpr, EXPERT_CUT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row_blocks = tl.cdiv(num_tokens, BLOCK_R)
    # Neighbouring programs share their experts: the larger table is read once.
    block = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    column = block * BLOCK_C + tl.arange(0, BLOCK_C)
    scores = _scores(
        hidden, experts, scales, row_keys, row, column, num_tokens, num_experts, dim,
        hidden_stride, expert_stride, noise_std,
        DIM, HIDDEN_PARTS, EXPERT_PARTS, HIDDEN_CUT, EXPERT_CUT,
        BLOCK_R, BLOCK_C, BLOCK_D, PART,
    )  # fmt: skip
    scores = tl.where((column < num_experts)[None, :], scores, -INFINITY)
    at = chunk + row.to(tl.int64)[:, None] * chunk_stride + column[None, :]
    tile = row * (chunk_stride // BLOCK_C) + block
    if log_z is not None:
        shift = tl.load(log_z + row, mask=row < num_tokens, other=INFINITY)  # no row: 0
        probs = tl.exp(scores - shift[:, None])
        grads = tl.load(grad_mean + column, mask=column < num_experts, other=0.0)
        tl.store(at, probs)
        tl.store(tile_sums + tile, tl.sum(probs * grads[None, :], axis=1))
    else:
        # A tile may be all padding. NaN is no peak, but the sum has it.
        peak = tl.maximum(tl.max(scores, axis=1), -FLOAT32_MAX)
        tl.store(at, scores)
        tl.store(tile_peaks + tile, peak)
        tl.store(tile_sums + tile, tl.sum(tl.exp(scores - peak[:, None]), axis=1))


@triton.jit
def log_z_kernel(
    tile_sums, tile_peaks, log_z, num_tokens, num_tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_tokens
    lane = tl.arange(0, BLOCK)
    peaks = tl.full((ROWS, BLOCK), -FLOAT32_MAX, tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, num_tiles, BLOCK):
        at = row[:, None] * num_tiles + (start + lane)[None, :]
        mask = real[:, None] & (start + lane < num_tiles)[None, :]
        peak = tl.load(tile_peaks + at, mask=mask, other=-FLOAT32_MAX)
        more = tl.load(tile_sums + at, mask=mask, other=0.0)
        higher = tl.maximum(peaks, peak)
        sums = sums * tl.exp(peaks - higher) + more * tl.exp(peak - higher)
        peaks = higher
    peak = tl.max(peaks, axis=1)
    total = tl.sum(sums * tl.exp(peaks - peak[:, None]), axis=1)
    tl.store(log_z + row, peak + tl.log(tl.where(real, total, 1.0)), mask=real)


@triton.jit
def mean_kernel(
    chunk, log_z, weights, mean, num_tokens, num_experts, chunk_stride, tokens_per_split,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    first = tl.program_id(1) * tokens_per_split
    last = tl.minimum(first + tokens_per_split, num_tokens)
    total = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in tl.range(first, last, BLOCK_T, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_T)
        weight = tl.load(weights + row, mask=row < last, other=0.0)
        shift = tl.load(log_z + row, mask=row < last, other=0.0)
        counts = (weight != 0)[:, None]  # what does not count may hold anything
        at = chunk + row.to(tl.int64)[:, None] * chunk_stride + column[None, :]
        scores = tl.load(at, mask=counts, other=0.0)
        total += tl.where(counts, tl.exp(scores - shift[:, None]) * weight[:, None], 0.0)
    place = mean + tl.program_id(1).to(tl.int64) * num_experts + column
    real = column < num_experts
    so_far = tl.load(place, mask=real, other=0.0)
    tl.store(place, so_far + tl.sum(total, axis=0).to(tl.float64), mask=real)


@triton.jit
def hidden_grads_kernel(
    chunk, experts, scales, bases, weights, grad_mean, partial,
    num_tokens, num_experts, expert_stride, chunk_stride, experts_per_split,
    DIM: tl.constexpr, PARTS: tl.constexpr, CUT: tl.constexpr, REACH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    depth = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tl.program_id(2) * experts_per_split
    last = tl.minimum(first + experts_per_split, num_experts)
    lane = tl.arange(0, BLOCK_K)
    base = tl.load(bases + row, mask=row < num_tokens, other=0.0)[:, None]
    weight = tl.load(weights + row, mask=row < num_tokens, other=0.0)[:, None]
    rows_at = chunk + row.to(tl.int64)[:, None] * chunk_stride
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for start in range(first, last, BLOCK_K):
        column = start + lane
        real = column < num_experts  # the padding has probability 0
        towards = tl.load(grad_mean + column, mask=real, other=0.0)[None, :]
        grads = tl.load(rows_at + column[None, :]) * (base + weight * towards)
        if scales is not None:
            grads *= tl.load(scales + column, mask=real, other=0.0)[None, :]
        left_1, left_2, left_3 = cut(grads, PART)
        table_row = tl.minimum(column, num_experts - 1).to(tl.int64)
        right_1, right_2, right_3 = _load_parts(
            experts + table_row[:, None] * DIM + depth[None, :], expert_stride,
            None if DIM % BLOCK_D == 0 else (depth < DIM)[None, :], PARTS, CUT, PART,
        )  # fmt: skip
        total += _product(left_1, left_2, left_3, right_1, right_2, right_3, 3, PARTS, REACH)
    store_rows(partial, tl.program_id(2) * num_tokens + row, row < num_tokens, depth, total, DIM)


@triton.jit
def expert_grads_kernel(
    chunk, hidden, bases, weights, grad_mean, sums,
    num_tokens, num_experts, hidden_stride, chunk_stride, first_chunk,
    DIM: tl.constexpr, PARTS: tl.constexpr, CUT: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    # Neighbouring programs share their probabilities.
    depth = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.program_id(0) // blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    lane = tl.arange(0, BLOCK_K)
    real = column < num_experts
    towards = tl.load(grad_mean + column, mask=real, other=0.0)[None, :]
    total = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for start in range(0, num_tokens, BLOCK_K):
        row = start + lane
        base = tl.load(bases + row, mask=row < num_tokens, other=0.0)[:, None]
        weight = tl.load(weights + row, mask=row < num_tokens, other=0.0)[:, None]
        at = chunk + row.to(tl.int64)[:, None] * chunk_stride + column[None, :]
        grads = tl.load(at) * (base + weight * towards)
        left_1, left_2, left_3 = cut(grads, PART)
        token = tl.minimum(row, num_tokens - 1).to(tl.int64)
        right_1, right_2, right_3 = _load_parts(
            hidden + token[:, None] * DIM + depth[None, :], hidden_stride,
            None if DIM % BLOCK_D == 0 else (depth < DIM)[None, :], PARTS, CUT, PART,
        )  # fmt: skip
        total += _product(
            tl.trans(left_1), tl.trans(left_2), tl.trans(left_3), right_1, right_2, right_3,
            3, PARTS, 3,
        )  # fmt: skip
    if first_chunk == 0:
        total += load_rows(sums, column, real, depth, DIM)
    store_rows(sums, column, real, depth, total, DIM)


@triton.jit
def project_kernel(
    sums, table, inverse, out, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The gradient came through w / |w|: drop its part along the row, and divide by the norm."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    mask = row < num_rows
    scale = tl.load(inverse + row, mask=mask, other=0.0)[:, None]
    grad = load_rows(sums, row, mask, columns, DIM)
    unit = load_rows(table, row, mask, columns, DIM).to(tl.float32) * scale
    grad -= unit * tl.sum(grad * unit, axis=1)[:, None]
    store_rows(out, row, mask, columns, grad * scale, DIM)
