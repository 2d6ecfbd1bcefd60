"""Ways to rank experts for a cell: each gives lists [G, size] of expert ids, best first."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from airmoe.experiments.recall_study.cells import CellTokens, Spread
from airmoe.experiments.recall_study.overlap import exact_choices, parts

HALVINGS = 30
# Of the largest score: below it a deviation is rounding, and only the mean decides.
LEAST_DEVIATION = 1e-4


def by_codeword(codewords: Tensor, experts: Tensor, size: int) -> Tensor:
    """By <c_g, w_e>, as AIR ranks them (Alg. 1, lines 4-7)."""
    lists = [_best(part @ experts.T, size) for part in parts(codewords, experts.shape[0])]
    return torch.cat(lists)


def by_spread(cells: CellTokens, spread: Spread, experts: Tensor, top_k: int, size: int) -> Tensor:
    """By the chance that a token of the cell has the expert among its K best.

    Scores of a cell's tokens are taken for normal: around that of the mean state, as wide as the
    spread makes them. An expert is chosen where it passes a threshold; it is the cell's threshold
    that K experts pass on average.
    """
    loadings = spread.loadings(experts)
    lists = []
    for block in _blocks(cells, experts):
        scores = cells.means[block] @ experts.T  # [g, E]
        deviations = (spread.variances[block] @ loadings.T).clamp_min(0).sqrt()
        deviations = deviations.maximum(LEAST_DEVIATION * scores.abs().amax(1, keepdim=True))
        threshold = _threshold(scores, deviations, top_k)
        lists.append(_best((scores - threshold) / deviations, size))
    return torch.cat(lists)


def by_use(cells: CellTokens, experts: Tensor, top_k: int, size: int) -> Tensor:
    """By how many of the cell's tokens have the expert among their K best.

    For these very tokens no other list of a cell holds more. The mean state decides between
    experts that are used equally often.
    """
    lists = []
    for block in _blocks(cells, experts):
        tokens = cells.order[cells.starts[block.start] : cells.starts[block.stop]]
        used = experts.new_zeros(block.stop - block.start, experts.shape[0])
        for rows in parts(tokens, experts.shape[0]):
            chosen = exact_choices(cells.hidden[rows], experts, top_k)  # [t, K]
            place = (cells.codeword_ids[rows] - block.start).unsqueeze(1) * experts.shape[0]
            one = used.new_ones(()).expand(chosen.numel())
            used.view(-1).index_add_(0, (place + chosen).flatten(), one)  # whole numbers: exact
        lists.append(_best(used + _below_one(cells.means[block] @ experts.T), size))
    return torch.cat(lists)


def by_soft_use(
    cells: CellTokens, spread: Spread, experts: Tensor, top_k: int, size: int, *, tokens: int
) -> Tensor:
    """As `by_use`, from the first `tokens` of each cell: what one training batch could tell.

    So few say little by yes and no. An expert counts by how far it is from a token's threshold, in
    units of the pooled spread (a sigmoid of width 1).
    """
    width = (spread.loadings(experts) @ spread.variances[0]).clamp_min(0).sqrt().mean()
    starts = torch.tensor(cells.starts, device=experts.device)
    counts = starts.diff()
    lists = []
    for block in _blocks(cells, experts):
        means = cells.means[block] @ experts.T  # [g, E]
        used = 1e-6 * _below_one(means)
        for place in range(tokens):  # one token of each cell at a time: always the same sum
            filled = (counts[block] > place).nonzero().squeeze(1)  # [g]
            rows = cells.order[starts[block][filled] + place]
            scores = cells.hidden[rows] @ experts.T  # [g, E]
            threshold = scores.topk(top_k, dim=1).values[:, -1:]
            used[filled] += torch.sigmoid((scores - threshold) / width.clamp_min(1e-12))
        lists.append(_best(used, size))
    return torch.cat(lists)


def _best(scores: Tensor, size: int) -> Tensor:
    return scores.topk(size, dim=1).indices


def _below_one(scores: Tensor) -> Tensor:
    """Scores made so small that they only order what is equal in whole numbers."""
    largest = scores.abs().amax(1, keepdim=True)
    return 1e-3 * scores / torch.where(largest > 0, largest, 1.0)


def _blocks(cells: CellTokens, experts: Tensor) -> Iterator[slice]:
    """Cells in blocks whose [cells, E] numbers fit into memory."""
    for part in parts(torch.arange(cells.num_cells), experts.shape[0]):
        yield slice(int(part[0]), int(part[-1]) + 1)


def _threshold(scores: Tensor, deviations: Tensor, top_k: int) -> Tensor:
    """[g, 1], passed by K experts on average: found by halving."""
    low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        passing = torch.special.ndtr((scores - middle) / deviations).sum(1, keepdim=True)
        low = torch.where(passing > top_k, middle, low)
        high = torch.where(passing > top_k, high, middle)
    return (low + high) / 2
