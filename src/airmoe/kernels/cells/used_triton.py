"""How often each entry of the pools was chosen, and the reverse index of those that were.

Gradients of the others are 0. A cell of a few tokens uses only some of its pool, so that a third of
all partial sums of a trained model would be written, read and added for nothing.
"""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.cells.reverse import ReverseIndex

BLOCK = 1024


@triton.jit
def _counts_kernel(
    gates, offsets, out, POOL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr
):
    cell = tl.program_id(1)
    places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    place_mask = places < POOL
    total = tl.zeros((BLOCK_T, BLOCK_P), tl.int32)
    first = tl.load(offsets + cell)
    last = tl.load(offsets + cell + 1)
    for start in range(first, last, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        gate = tl.load(
            gates + rows.to(tl.int64)[:, None] * POOL + places[None, :],
            mask=(rows < last)[:, None] & place_mask[None, :],
            other=0.0,
        )
        total += (gate > 0).to(tl.int32)
    tl.store(out + cell.to(tl.int64) * POOL + places, tl.sum(total, axis=0), mask=place_mask)


def counts_per_entry(gates: Tensor, offsets: Tensor, pools: Tensor) -> Tensor:
    """How many rows of each cell chose each of its experts: [G, M] int32."""
    pool = pools.shape[1]
    out = torch.empty(pools.shape, dtype=torch.int32, device=pools.device)
    block_p = max(16, min(triton.next_power_of_2(pool), 256))
    _counts_kernel[(triton.cdiv(pool, block_p), pools.shape[0])](
        gates.contiguous(), offsets, out, POOL=pool, BLOCK_T=16, BLOCK_P=block_p, num_warps=4
    )
    return out


@triton.jit
def _flags_kernel(entries, counts, flags, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    entry = tl.load(entries + places, mask=mask, other=0)
    count = tl.load(counts + entry, mask=mask, other=0)
    tl.store(flags + places, (count > 0).to(tl.int32), mask=mask)


@triton.jit
def _keep_kernel(entries, flags, ends, starts, kept, kept_starts, size, num_starts,
                 BLOCK: tl.constexpr):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    chosen = tl.load(flags + places, mask=mask, other=0) > 0
    entry = tl.load(entries + places, mask=mask, other=0)
    end = tl.load(ends + places, mask=mask, other=0)
    tl.store(kept + end - 1, entry, mask=mask & chosen)
    inside = places < num_starts
    start = tl.load(starts + places, mask=inside, other=0)
    before = tl.load(ends + start - 1, mask=inside & (start > 0), other=0)
    tl.store(kept_starts + places, before, mask=inside)


def used_entries(reverse: ReverseIndex, counts: Tensor) -> ReverseIndex:
    """Entries whose count [G, M] is not 0; there is room for all of them, the end is not set."""
    size, num_starts = reverse.entries.shape[0], reverse.starts.shape[0]
    flags = torch.empty_like(reverse.entries)
    grid = (triton.cdiv(size, BLOCK),)
    _flags_kernel[grid](reverse.entries, counts, flags, size, BLOCK=BLOCK, num_warps=4)
    ends = flags.cumsum(0, dtype=torch.int32)
    kept, starts = torch.empty_like(reverse.entries), torch.empty_like(reverse.starts)
    grid = (triton.cdiv(max(size, num_starts), BLOCK),)
    _keep_kernel[grid](
        reverse.entries, flags, ends, reverse.starts, kept, starts, size, num_starts,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return ReverseIndex(kept, starts)
