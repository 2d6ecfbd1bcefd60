"""Each token's best experts among all. Rows are tokens, columns are experts."""

# pyright: reportArgumentType=none, reportCallIssue=none, reportIndexIssue=none
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from airmoe.kernels.backend import chunks
from airmoe.kernels.best_columns_triton import Tables, best_columns, whole
from airmoe.kernels.device_triton import bfloat16_parts
from airmoe.kernels.norms_triton import inverse_norms

SPLIT_TOKENS = 256  # from so many tokens on a copy of the experts in parts pays
SPLIT_ELEMENTS = 1 << 27  # the largest table of experts that is copied so: 768 MiB
NORM_TOKENS = 129  # from so many on norms are measured once, not in every block of tokens
SORT_ELEMENTS = 1 << 22  # scores sorted at a time
LARGEST_RANKED = 1024  # longer lists are sorted: counting grows with the square
RANK_TILE = 16  # scores that all others are compared with in one step


def exact_tables(
    hidden: Tensor,
    experts: Tensor,
    row_keys: Tensor | None = None,
    noise_std: float = 0.0,
    normalize: bool = False,
) -> Tables:
    """Both as the matrix units take them, their products as exact as float32."""
    many = hidden.shape[0] >= NORM_TOKENS
    scales = inverse_norms(experts) if normalize and many else None
    inside = normalize and not many
    halves = hidden.dtype == experts.dtype == torch.float16
    exact, exact_experts = (table.dtype == torch.bfloat16 for table in (hidden, experts))
    form = scales, row_keys, noise_std
    copies = hidden.shape[0] >= SPLIT_TOKENS and experts.numel() <= SPLIT_ELEMENTS
    if halves or (exact and exact_experts):
        return Tables(whole(hidden), whole(experts), *form, False, inside)
    if (exact_experts and not inside) or copies:
        rows = whole(hidden) if exact else bfloat16_parts(hidden)
        columns = whole(experts) if exact_experts else bfloat16_parts(experts)
        return Tables(rows, columns, *form, False)
    return Tables(whole(hidden), whole(experts), *form, True, inside)


@triton.jit
def _rank_kernel(
    scores_ptr, ids_ptr, out_ptr, count, BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The rank of a score is how many are larger: every thread counts for scores of its own."""
    row = tl.program_id(0).to(tl.int64) * count
    place = tl.arange(0, BLOCK)
    real = place < count
    scores = tl.load(scores_ptr + row + place, mask=real, other=0.0)
    ids = tl.load(ids_ptr + row + place, mask=real, other=0)
    rank = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, TILE):
        other = start + tl.arange(0, TILE)
        others = tl.load(scores_ptr + row + other, mask=other < count, other=-float("inf"))
        rank += tl.sum((others[:, None] > scores[None, :]).to(tl.float32), axis=0)
    total = tl.sum(tl.where(real, rank, 0.0), axis=0)
    if total != count * (count - 1) // 2:  # some are equal: the lower id, that stands earlier, wins
        for start in range(0, count, TILE):
            other = start + tl.arange(0, TILE)
            others = tl.load(scores_ptr + row + other, mask=other < count, other=-float("inf"))
            tied = (others[:, None] == scores[None, :]) & (other[:, None] < place[None, :])
            rank += tl.sum(tied.to(tl.float32), axis=0)
    tl.store(out_ptr + row + rank.to(tl.int32), ids.to(tl.int64), mask=real)


def _best_first(ids: Tensor, scores: Tensor) -> Tensor:
    """Ascending ids [T, count] int32 and finite scores -> ids int64 in the order of scores."""
    num_tokens, count = ids.shape
    ordered = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    if count <= LARGEST_RANKED:
        block = triton.next_power_of_2(count)
        _rank_kernel[(num_tokens,)](
            scores, ids, ordered, count,
            BLOCK=block, TILE=RANK_TILE, num_warps=max(1, block // 128),
        )  # fmt: skip
        return ordered
    for rows in chunks(num_tokens, max(1, SORT_ELEMENTS // count)):
        # Ids ascend, so a stable sort leaves ties in their order.
        order = scores[rows].sort(dim=-1, descending=True, stable=True).indices
        ordered[rows] = ids[rows].gather(-1, order)
    return ordered


def best_experts(
    hidden: Tensor,
    experts: Tensor,
    count: int,
    row_keys: Tensor | None,
    noise_std: float,
    normalize: bool,
) -> Tensor:
    """[T, D] and [E, D] -> [T, count] expert ids, best first."""
    num_tokens, device = hidden.shape[0], hidden.device
    ids = torch.empty(num_tokens, count, dtype=torch.int32, device=device)
    if ids.numel() == 0:
        return ids.long()
    tables = exact_tables(hidden, experts, row_keys, noise_std, normalize)
    scores = torch.empty(num_tokens, count, dtype=torch.float32, device=device)
    best_columns(tables, ids, scores)
    return _best_first(ids, scores)
