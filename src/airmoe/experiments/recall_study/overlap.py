"""Exact routing's choices, and the share of them that shortlists hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SCORES_AT_A_TIME = 1 << 25  # of tokens or codewords with experts: 128 MiB, and as much for top-k


def parts(rows: Tensor, num_experts: int) -> Sequence[Tensor]:
    """Rows in parts whose [rows, E] numbers fit into memory."""
    return rows.split(max(1, SCORES_AT_A_TIME // num_experts))


def exact_choices(hidden: Tensor, experts: Tensor, top_k: int) -> Tensor:
    """The K best experts of each token: [T, D], [E, D] -> [T, K] int32, never as [T, E]."""
    chosen = [
        (part @ experts.T).topk(top_k, dim=1).indices.int()
        for part in parts(hidden, experts.shape[0])
    ]
    return torch.cat(chosen)


def overlaps(
    exact: Tensor, codeword_ids: Tensor, lists: Tensor, sizes: Sequence[int], num_experts: int
) -> list[float]:
    """Share of the exact choices [T, K] that lists of each size hold, over all tokens.

    lists [G, M] best first: a shorter list is the beginning of a longer one. A token has the lists
    of its codeword_ids [T, probes]; an expert in several of them counts once.
    """
    longest = lists.shape[1]
    places = torch.arange(longest, dtype=torch.int32, device=lists.device)
    found = [0] * len(sizes)
    for rows in parts(torch.arange(exact.shape[0], device=exact.device), num_experts):
        # [t, E] the best place of each expert in the lists of a token; `longest`: in none
        best = places.new_full((rows.shape[0], num_experts), longest)
        for ids in codeword_ids[rows].unbind(1):
            listed = lists[ids]  # [t, M]
            best.scatter_(1, listed, best.gather(1, listed).minimum(places))
        place = best.gather(1, exact[rows].long())  # [t, K]
        for index, size in enumerate(sizes):
            found[index] += int((place < size).sum())
    return [count / exact.numel() for count in found]
