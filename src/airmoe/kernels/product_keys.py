"""PEER's search: the best pairs of two scored halves, without scoring all pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.backend import with_kernel
from airmoe.kernels.top_k import top_positions

LONGEST_SIDE, MOST_PAIRS = 4096, 1024  # scores and pairs of ranks that fit into a GPU's registers


def _fits_kernel(first: Tensor, _second: Tensor, count: int) -> bool:
    side = first.shape[-1]
    short = side <= LONGEST_SIDE and num_rank_pairs(side, count) <= MOST_PAIRS
    return short and first.dtype == torch.float32


def _empty_ids(first: Tensor, _second: Tensor, count: int) -> Tensor:
    return first.new_empty(*first.shape[:2], count, dtype=torch.int64)


@torch.no_grad()
@with_kernel("product_keys_triton", when=_fits_kernel, fake=_empty_ids)
def best_pairs(first: Tensor, second: Tensor, count: int) -> Tensor:
    """Expert ids i * side + j of the `count` largest a_i + b_j: [T, P, count] int64, best first.

    first, second [T, P, side] hold a and b. Selection is on the float32 sums, and ties go to the
    lowest id. The one exception are sums that only rounding made equal: a pair whose halves are
    both no better than those of `count` other pairs is not chosen, even if its id is lower.
    """
    side = first.shape[-1]
    depth = min(count, side)
    best_first, best_second = top_positions(first, depth), top_positions(second, depth)
    rank_first, rank_second = rank_pairs(side, count, first.device)
    places = best_first[..., rank_first] * side + best_second[..., rank_second]
    # Ascending ids, so that ties go to the lowest expert.
    places = places.sort(-1).values
    sums = first.gather(-1, places // side) + second.gather(-1, places % side)
    return places.gather(-1, top_positions(sums, count))


def num_rank_pairs(side: int, count: int) -> int:
    """How many pairs of ranks `rank_pairs` gives: about count * log(count)."""
    depth = min(count, side)
    return sum(min(depth, count // rank) for rank in range(1, depth + 1))


def rank_pairs(side: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranks in two sorted halves that can be among the `count` best sums: [n] each.

    The pair of ranks (r, s) is beaten by (r + 1)(s + 1) - 1 others, so only pairs with
    (r + 1)(s + 1) <= count can be. Made on the device: a copy would make a GPU wait.
    """
    depth = min(count, side)
    lengths = (count // torch.arange(1, depth + 1, device=device)).clamp_max(depth)
    ends = lengths.cumsum(0)  # where the pairs with one first rank end
    places = torch.arange(num_rank_pairs(side, count), device=device)
    rank_first = torch.searchsorted(ends, places, right=True)
    return rank_first, places - (ends - lengths)[rank_first]
