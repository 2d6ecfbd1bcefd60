"""Shortlists that leave nobody out: an expert that no list holds gets no token and no gradient.

Only the codewords' favourites are listed, so an expert whose centroid started where no token is
stays there for good: nothing moves it. In the list of its nearest codeword it is a candidate, and
the load-balance loss turns it towards the tokens of that cell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from airmoe.kernels.assign import assign
from airmoe.kernels.rows import gather_dot

MOST_REPLACED = 4  # at most one entry in so many makes room


@torch.no_grad()
def cover(
    shortlists: Tensor, codewords: Tensor, centroids: Tensor, inverse_norms: Tensor | None = None
) -> Tensor:
    """[G, M] ascending ids -> the same with every expert in at least one list, if there is room.

    An unlisted expert joins the list of its nearest codeword and takes the place of the worst one
    there; but one list of each expert keeps it, so that nobody falls out of all. (Not the place of
    the one in most lists: where every list has to make room, it would be put out of all.) Fixed
    shapes and no reading back, so that a graph can hold it.
    """
    num_codewords, size = shortlists.shape
    num_experts, device = centroids.shape[0], centroids.device
    codeword_ids = torch.arange(num_codewords, device=device)
    # A number of an expert in each of its lists; the lowest keeps it, another list for each expert.
    turns = (codeword_ids.unsqueeze(-1) - shortlists) % num_codewords  # [G, M]
    lowest = torch.full((num_experts,), num_codewords, device=device)  # [E], G: in no list
    lowest.scatter_reduce_(0, shortlists.flatten(), turns.flatten(), "amin")
    kept = turns == lowest[shortlists]  # [G, M]
    worst = _worst_first(shortlists, codewords, centroids, inverse_norms, kept)  # [G, M] places
    room = (~kept).sum(-1).clamp(max=size // MOST_REPLACED)  # [G]
    home = assign(centroids, codewords, euclidean=False).squeeze(-1)  # [E]
    # Those that are listed go to a row that is thrown away, and so do those without room.
    home = torch.where(lowest < num_codewords, num_codewords, home)
    home, experts = home.sort(stable=True)  # the unlisted first, by codeword, ids ascending
    first = torch.searchsorted(home, torch.arange(num_codewords + 1, device=device))
    number = torch.arange(num_experts, device=device) - first[home]  # of an expert in its group
    fits = number < torch.cat([room, room.new_zeros(1)])[home]
    row = torch.where(fits, home, num_codewords)
    rows, worst = (torch.cat([table, table[:1]]) for table in (shortlists, worst))
    rows[row, worst[row, torch.where(fits, number, 0)]] = experts
    return rows[:num_codewords].sort(-1).values


def _worst_first(
    shortlists: Tensor,
    codewords: Tensor,
    centroids: Tensor,
    inverse_norms: Tensor | None,
    kept: Tensor,
) -> Tensor:
    """[G, M] places of each list by score, those that are kept last."""
    scores = gather_dot(codewords, centroids, shortlists)
    if inverse_norms is not None:
        scores = scores * inverse_norms[shortlists]
    return scores.masked_fill(kept, torch.inf).argsort(dim=-1, stable=True)
