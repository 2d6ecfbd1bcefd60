"""Codebooks fitted to states that are there already, and what lies in their cells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.kernels.codeword_sums import codeword_sums
from airmoe.routers.codebook import Codebook
from airmoe.routers.k_means import k_means

PASSES = 12
TOKENS_AT_A_TIME = 1 << 16
OWN_WEIGHT = 0.7  # of a cell's own variances beside the pooled ones: some cells have few tokens


def fitted_codebook(hidden: Tensor, num_codewords: int, seed: int) -> Codebook:
    """Spherical k-means on [T, D]; codewords without a token are drawn anew in every pass."""
    dim = hidden.shape[1]
    # Without decay every update is one whole step of k-means (Lloyd) on the tokens given.
    return k_means(lambda: Codebook(num_codewords, dim, decay=0.0), hidden, PASSES, seed)


@dataclass(frozen=True)
class CellTokens:
    """The tokens of each cell, their mean states, and how to find them."""

    hidden: Tensor  # [T, D]
    codeword_ids: Tensor  # [T]
    order: Tensor  # [T] tokens by cell, within a cell as they came
    starts: list[int]  # G + 1 places in `order`
    counts: Tensor  # [G]
    means: Tensor  # [G, D]; of a cell without tokens its codeword

    @property
    def num_cells(self) -> int:
        return self.means.shape[0]


def cell_tokens(codebook: Codebook, hidden: Tensor) -> CellTokens:
    """hidden [T, D] by nearest codeword."""
    codeword_ids = codebook.assign(hidden)
    found = _sums(hidden, codeword_ids, codebook.num_codewords)
    counts = found.counts
    means = torch.where(
        (counts > 0).unsqueeze(1), found.sums / counts.clamp_min(1).unsqueeze(1), codebook.codewords
    )
    return CellTokens(
        hidden=hidden,
        codeword_ids=codeword_ids,
        order=codeword_ids.argsort(stable=True),
        starts=[0, *counts.long().cumsum(0).tolist()],
        counts=counts,
        means=means,
    )


@dataclass(frozen=True)
class Spread:
    """How far tokens lie from the mean of their cell, along the axes of the pooled covariance."""

    basis: Tensor  # [D, D], an axis per column
    variances: Tensor  # [G, D]

    def loadings(self, experts: Tensor) -> Tensor:
        """[E, D] -> [E, D]: what a variance of 1 along each axis adds to that of the scores."""
        return (experts @ self.basis).square()


def pooled_spread(cells: CellTokens) -> Spread:
    """One covariance for all cells: that of all tokens around the means of their cells."""
    dim = cells.hidden.shape[1]
    covariance = cells.hidden.new_zeros(dim, dim)
    for hidden, codeword_ids in _token_parts(cells):
        rest = hidden - cells.means[codeword_ids]
        covariance += rest.T @ rest
    variances, basis = torch.linalg.eigh(covariance / cells.hidden.shape[0])
    return Spread(basis, variances.clamp_min(0).expand(cells.num_cells, dim))


def cell_spread(cells: CellTokens, pooled: Spread) -> Spread:
    """Each cell's own variances, along the pooled axes and drawn a little to the pooled ones."""
    squares = torch.zeros_like(cells.means)
    for hidden, codeword_ids in _token_parts(cells):
        rest = (hidden - cells.means[codeword_ids]) @ pooled.basis
        squares += _sums(rest.square(), codeword_ids, cells.num_cells).sums
    own = squares / cells.counts.clamp_min(1).unsqueeze(1)
    return Spread(pooled.basis, OWN_WEIGHT * own + (1 - OWN_WEIGHT) * pooled.variances)


def _token_parts(cells: CellTokens) -> zip[tuple[Tensor, Tensor]]:
    return zip(
        cells.hidden.split(TOKENS_AT_A_TIME),
        cells.codeword_ids.split(TOKENS_AT_A_TIME),
        strict=True,
    )


@dataclass(frozen=True)
class CellSums:
    """Of rows, by codeword."""

    sums: Tensor  # [G, D]
    counts: Tensor  # [G]


def _sums(rows: Tensor, codeword_ids: Tensor, num_codewords: int) -> CellSums:
    """In an order that does not vary on a GPU."""
    valid = torch.ones_like(codeword_ids, dtype=torch.bool)
    summed = codeword_sums(rows, valid, codeword_ids, num_codewords, spherical=False)
    return CellSums(summed[:, :-1], summed[:, -1])
