"""Fitting codebooks on sampled activations, and measuring what their shortlists keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.adapt.codebook import ScaledCodebook
from airmoe.adapt.layers import CalibratedLayer
from airmoe.adapt.report import Trial, products
from airmoe.distributed import all_reduce_sum
from airmoe.routers.codebook import Codebook, k_means

CHUNK_ELEMENTS = 1 << 23  # of the exact logits held at a time
FEW_EXPERTS = 64  # up to here every size of shortlist is tried


@dataclass(frozen=True)
class Chunk:
    """Some tokens, sorted by codeword, with exact logits and every expert's rank.

    The rank of an expert is its place in the order of the token's codeword: a shortlist of M holds
    the ranks below M.
    """

    rows: Tensor  # [t]
    codeword_ids: Tensor  # [t]
    logits: Tensor  # [t, E]
    ranks: Tensor  # [t, E]


def fit(
    layer: CalibratedLayer, hidden: Tensor, num_codewords: int, passes: int, seed: int
) -> Codebook:
    """A new codebook of the layer's kind, fitted to hidden [T, D]."""
    codebook = k_means(lambda: layer.new_codebook(num_codewords), hidden, passes, seed)
    if isinstance(codebook, ScaledCodebook):
        codebook.measure_scales(hidden)
    return codebook


@torch.no_grad()
def measure(
    layer: CalibratedLayer, codebook: Codebook, hidden: Tensor, sizes: Sequence[int]
) -> list[Trial]:
    """What shortlists of every size keep, as means over tokens [T, D] of all ranks.

    The bound is Prop. 1's. Near its codeword's token r a token h has logits within |w| |h - r| of
    those of r, and both softmax and sigmoid turn that into at most this factor of what the
    shortlist keeps of r's own distribution: exp(-2 |w| |h - r|).
    """
    near, norm, experts = layer.representatives(codebook), layer.largest_norm(), layer.num_experts
    overlaps = torch.zeros(len(sizes), dtype=torch.float64, device=hidden.device)
    masses, bounds = (overlaps.new_zeros(experts) for _ in range(2))  # by rank
    for chunk in _chunks(layer, codebook, hidden):
        logits, ranks = chunk.logits, chunk.ranks
        masses += _by_rank(layer.masses(logits), ranks).sum(0)
        error = (hidden[chunk.rows].to(logits.dtype) - near[chunk.codeword_ids]).norm(dim=1)
        factor = (-2 * norm * error).exp().double()  # [t]
        used, places = chunk.codeword_ids.unique(return_inverse=True)
        own = layer.masses(layer.logits(near[used]))[places]  # [t, E]
        bounds += factor @ _by_rank(own, ranks)
        exact = layer.chosen(logits)  # [t, K]
        right = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, exact, True)
        for place, size in enumerate(sizes):
            if layer.keeps_candidates:
                found = right & (ranks < size)
            else:
                ids = layer.chosen(logits.masked_fill(ranks >= size, -torch.inf))
                found = right.gather(1, ids)
            overlaps[place] += found.sum(dtype=torch.float64) / exact.shape[1]
    total = sum_over_ranks(hidden.shape[0], hidden.device)
    kept = [all_reduce_sum(values.cumsum(0)) / total for values in (masses, bounds)]
    kept[0][-1] = 1.0  # whatever rounding says
    return [
        Trial(
            num_codewords=codebook.num_codewords,
            shortlist_size=size,
            overlap=overlap,
            mass_recall=float(kept[0][size - 1]),
            bound=float(kept[1][size - 1]),
            scored=products(codebook.num_codewords, size, experts),
        )
        for size, overlap in zip(sizes, (all_reduce_sum(overlaps) / total).tolist(), strict=True)
    ]


def _by_rank(masses: Tensor, ranks: Tensor) -> Tensor:
    """[t, E] by expert -> [t, E] float64 by rank."""
    return torch.zeros_like(masses, dtype=torch.float64).scatter_(1, ranks, masses.double())


def sizes_to_try(layer: CalibratedLayer) -> list[int]:
    """Shortlist sizes: all where experts are few, else growing by a factor of sqrt(2)."""
    if layer.num_experts <= FEW_EXPERTS:
        return list(range(layer.least_size, layer.num_experts + 1))
    sizes, size = {layer.shortlist_size, layer.num_experts}, float(layer.least_size)
    while size < layer.num_experts:
        sizes.add(round(size))
        size *= 2**0.5
    return sorted(sizes)


def codewords_to_try(layer: CalibratedLayer, total: int) -> list[int]:
    """A quarter, half and twice as many codewords as now, where there are tokens for them."""
    now = layer.num_codewords
    others = {max(1, now // 4), max(1, now // 2), 2 * now}
    return sorted({now, *(count for count in others if 4 * count <= total)})


def sum_over_ranks(count: int, device: torch.device) -> int:
    """The sum of all ranks' counts: they must decide alike."""
    return int(all_reduce_sum(torch.tensor(count, device=device)))


def _chunks(layer: CalibratedLayer, codebook: Codebook, hidden: Tensor) -> Iterator[Chunk]:
    """Tokens come by codeword, so that few orders of experts are needed at a time."""
    near = layer.representatives(codebook)
    codeword_ids = codebook.nearest(hidden)  # [T]
    by_codeword = codeword_ids.argsort(stable=True)
    for rows in by_codeword.split(max(1, CHUNK_ELEMENTS // layer.num_experts)):
        ids = codeword_ids[rows]
        used, places = ids.unique(return_inverse=True)
        ranks = layer.ranking(near[used]).argsort(-1)  # [g, E]
        yield Chunk(rows, ids, layer.logits(hidden[rows]), ranks[places])
