"""Shortlists that leave nobody out: an expert that no list holds gets no token and no gradient.

Only the codewords' favourites are listed, so an expert whose centroid started where no token is
stays there for good: nothing moves it. In the list of its nearest codeword it is a candidate, and
the load-balance loss turns it towards the tokens of that cell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.assign import assign

MOST_REPLACED = 4  # at most one entry in so many makes room


@torch.no_grad()
def cover(shortlists: Tensor, codewords: Tensor, centroids: Tensor) -> Tensor:
    """[G, M] ascending ids -> the same with every expert in at least one list, if there is room.

    An unlisted expert joins the list of its nearest codeword and takes the place of the one that is
    in most lists: it is missed least, and stays in the others. Fixed shapes and no reading back, so
    that a graph can hold it.
    """
    num_codewords, size = shortlists.shape
    num_experts, device = centroids.shape[0], centroids.device
    entries = shortlists.flatten()
    lists_of = torch.zeros(num_experts, dtype=torch.int32, device=device)  # [E]
    lists_of.scatter_add_(0, entries, torch.ones_like(entries, dtype=torch.int32))
    home = assign(centroids, codewords, euclidean=False).squeeze(-1)  # [E]
    # Those that are listed go to a row that is thrown away.
    home = torch.where(lists_of > 0, num_codewords, home)
    home, experts = home.sort(stable=True)  # the unlisted first, by codeword, ids ascending
    first = torch.searchsorted(home, torch.arange(num_codewords + 1, device=device))
    number = torch.arange(num_experts, device=device) - first[home]  # of an expert in its group
    fits = number < size // MOST_REPLACED
    row = torch.where(fits, home, num_codewords)
    rows = torch.cat([shortlists, shortlists[:1]])  # and the one that is thrown away
    commonest = lists_of[rows].argsort(dim=-1, descending=True, stable=True)  # [G + 1, M] places
    rows[row, commonest[row, torch.where(fits, number, 0)]] = experts
    return rows[:num_codewords].sort(-1).values
