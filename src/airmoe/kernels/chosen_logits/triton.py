"""Logits over lists of rows, their norms taken where the rows are fetched, and the gradients.

list_logits      one program per token (or part of its list) and tile after tile of its ids
scaled_grads     gradient of the products: that of the logits over the norm
table_grads      per expert the sum over its tokens, in float32 and in a fixed order, whose part
                 along the row itself is taken out before it is rounded: it may be nearly all
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
# pyright: reportReturnType=none, reportGeneralTypeIssues=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.rows import triton as rows
from airmoe.kernels.rows.triton import ENOUGH_PROGRAMS, Entries, tile_shape
from airmoe.kernels.shortlist.triton import inverse_root

SCALE_BLOCK = 1024
TILE_ELEMENTS = 4096  # [tokens, D] of one fetch of `table_grads`
NUM_WARPS = 4


@triton.jit
def _logits_kernel(
    hidden, table, ids, logits, num_ids, tiles_per_program,
    DIM: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * tiles_per_program * BLOCK_J
    last = tl.minimum(first + tiles_per_program * BLOCK_J, num_ids)
    lanes = tl.arange(0, BLOCK_J)
    own = token * num_ids
    next_ids = tl.load(ids + own + first + lanes, mask=first + lanes < last, other=0)
    for start in range(first, last, BLOCK_J):
        places = start + lanes
        mask = places < last
        rows = next_ids.to(tl.int64)
        # The ids of the next tile come while the rows of this one are on their way.
        next_ids = tl.load(ids + own + places + BLOCK_J, mask=places + BLOCK_J < last, other=0)
        total = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
        squares = tl.zeros((BLOCK_J, BLOCK_D), tl.float32)
        for column in range(0, DIM, BLOCK_D):
            columns = column + tl.arange(0, BLOCK_D)
            inside = columns < DIM
            query = tl.load(hidden + token * DIM + columns, mask=inside, other=0.0)
            values = tl.load(
                table + rows[:, None] * DIM + columns[None, :],
                mask=mask[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            total += values * query.to(tl.float32)[None, :]
            if NORMALIZE:
                squares += values * values
        dots = tl.sum(total, axis=1)
        if NORMALIZE:
            dots *= inverse_root(tl.sum(squares, axis=1))
        tl.store(logits + own + places, dots, mask=mask)


def list_logits(hidden: Tensor, table: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """<hidden[t], table[ids[t, k]]>, over the norm of the row with `normalize`: [T, K] float32."""
    (num_tokens, num_ids), dim = ids.shape, hidden.shape[1]
    logits = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if ids.numel() == 0:
        return logits
    block_j, block_d = tile_shape(num_ids, dim)
    tiles = triton.cdiv(num_ids, block_j)
    tiles_per_program = min(max(num_tokens * tiles // ENOUGH_PROGRAMS, 1), tiles)
    _logits_kernel[(num_tokens, triton.cdiv(tiles, tiles_per_program))](
        hidden, table, ids, logits, num_ids, tiles_per_program,
        DIM=dim, BLOCK_J=block_j, BLOCK_D=block_d, NORMALIZE=normalize, num_warps=NUM_WARPS,
    )  # fmt: skip
    return logits


@triton.jit
def _scale_kernel(grads, ids, inverse, scaled, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    row = tl.load(ids + place, mask=mask, other=0)
    factor = tl.load(inverse + row, mask=mask, other=0.0)
    tl.store(scaled + place, tl.load(grads + place, mask=mask, other=0.0) * factor, mask=mask)


def scaled_grads(grads: Tensor, ids: Tensor, inverse: Tensor) -> Tensor:
    """grads [T, K] float32 times inverse[ids]."""
    scaled = torch.empty_like(grads)
    if grads.numel():
        _scale_kernel[(triton.cdiv(grads.numel(), SCALE_BLOCK),)](
            grads, ids, inverse, scaled, grads.numel(), BLOCK=SCALE_BLOCK, num_warps=NUM_WARPS
        )
    return scaled


@triton.jit
def _store_projected(
    total, table, out, row, columns, DIM: tl.constexpr, PROJECT: tl.constexpr
):  # fmt: skip
    """The gradient of a row from that of its products; of w / |w| only what is across it."""
    inside = columns < DIM
    if PROJECT:
        unit = tl.load(table + row * DIM + columns, mask=inside, other=0.0).to(tl.float32)
        inverse = inverse_root(tl.sum(unit * unit, axis=0))
        unit *= inverse
        total = (total - unit * tl.sum(total * unit, axis=0)) * inverse
    tl.store(out + row * DIM + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _table_grads_kernel(
    grads, hidden, table, out, partial, order, starts, part_ends, part_ids, num_parts, num_rows,
    LIST: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, PROJECT: tl.constexpr,
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
            columns = tl.arange(0, WIDTH)
            lanes = tl.arange(0, BLOCK_N)
            total = tl.zeros((BLOCK_N, WIDTH), tl.float32)
            next_entries = tl.load(order + begin + lanes, mask=begin + lanes < end, other=0)
            for start in range(begin, end, BLOCK_N):
                places = start + lanes
                mask = places < end
                entries = next_entries
                next_entries = tl.load(
                    order + places + BLOCK_N, mask=places + BLOCK_N < end, other=0
                )
                factors = tl.load(grads + entries, mask=mask, other=0.0)
                values = tl.load(
                    hidden + (entries // LIST)[:, None] * DIM + columns[None, :],
                    mask=mask[:, None] & (columns < DIM)[None, :],
                    other=0.0,
                )
                total += factors[:, None] * values.to(tl.float32)
            summed = tl.sum(total, axis=0)
            if is_part:
                target = program.to(tl.int64) * DIM + columns
                tl.store(partial + target, summed, mask=columns < DIM)
            else:
                _store_projected(summed, table, out, row, columns, DIM, PROJECT)


@triton.jit
def _add_parts_kernel(
    partial, table, out, part_ends, part_ids, num_rows,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, PROJECT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.load(part_ids + part)
    if row < num_rows:
        first = tl.load(part_ends + row - 1, mask=row > 0, other=0)
        if part == first:  # one program per id, all its parts
            last = tl.load(part_ends + row)
            columns = tl.arange(0, WIDTH)
            total = tl.zeros((BLOCK_N, WIDTH), tl.float32)
            for start in range(first, last, BLOCK_N):
                parts = start + tl.arange(0, BLOCK_N)
                total += tl.load(
                    partial + parts[:, None] * DIM + columns[None, :],
                    mask=(parts < last)[:, None] & (columns < DIM)[None, :],
                    other=0.0,
                )
            _store_projected(tl.sum(total, axis=0), table, out, row, columns, DIM, PROJECT)


def table_grads(
    grads: Tensor, hidden: Tensor, table: Tensor, entries: Entries, project: bool
) -> Tensor:
    """Gradient of the table [E, D] in its dtype from that of the logits, grads [T, K] float32."""
    num_rows, dim = table.shape
    num_parts = entries.part_ids.shape[0]
    out = torch.empty(num_rows, dim, dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    partial = torch.empty(num_parts, dim, dtype=torch.float32, device=table.device)
    width = max(triton.next_power_of_2(dim), 16)
    sizes = {
        "DIM": dim, "BLOCK_N": max(TILE_ELEMENTS // width, 2), "WIDTH": width,
        "PROJECT": project, "num_warps": max(NUM_WARPS, width // 512),
    }  # fmt: skip
    _table_grads_kernel[(num_parts + num_rows,)](
        grads, hidden, table, out, partial,
        entries.order, entries.starts, entries.part_ends, entries.part_ids, num_parts, num_rows,
        LIST=max(entries.list_size, 1), PART=rows.PART_ENTRIES, **sizes,
    )  # fmt: skip
    if num_parts:
        _add_parts_kernel[(num_parts,)](
            partial, table, out, entries.part_ends, entries.part_ids, num_rows, **sizes
        )
    return out
