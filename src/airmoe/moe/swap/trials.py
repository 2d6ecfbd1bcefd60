"""Fitting codebooks on sampled activations, and measuring what their shortlists keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.distributed import all_reduce_sum
from airmoe.moe.swap.codebook import ScaledCodebook
from airmoe.moe.swap.layers import Layer
from airmoe.moe.swap.report import Trial, products
from airmoe.routers.codebook import Codebook
from airmoe.routers.k_means import k_means

CHUNK_ELEMENTS = 1 << 23  # of the exact logits held at a time
FEW_EXPERTS = 64  # up to here every size of shortlist is tried


@dataclass(frozen=True)
class Quality:
    """Per token, at one size of shortlist."""

    overlap: Tensor  # [T]
    mass_recall: Tensor  # [T]
    bound: Tensor  # [T]


def fit(layer: Layer, hidden: Tensor, num_codewords: int, passes: int, seed: int) -> Codebook:
    """A new codebook of the layer's kind, fitted to hidden [T, D]."""
    codebook = k_means(lambda: layer.new_codebook(num_codewords), hidden, passes, seed)
    if isinstance(codebook, ScaledCodebook):
        codebook.measure_scales(hidden)
    return codebook


@torch.no_grad()
def measure(layer: Layer, codebook: Codebook, hidden: Tensor, size: int) -> Quality:
    """Overlap, mass recall and its bound (Prop. 1) of tokens [T, D]; exact logits in chunks.

    Near its codeword's token r a token h has logits within |w| |h - r| of those of r, and both
    softmax and sigmoid turn that into at most this factor: exp(-2 |w| |h - r|) rho_M(r).
    """
    reach, norm = layer.representatives(codebook), layer.largest_norm()
    parts = []
    for rows, codeword_ids, logits, ranks in _ranked(layer, codebook, hidden):
        outside = ranks >= size  # [t, E]
        exact = layer.chosen(logits)  # [t, K]
        found = layer.chosen(logits.masked_fill(outside, -torch.inf))
        right = torch.zeros_like(outside).scatter_(1, exact, True)
        used, place = codeword_ids.unique(return_inverse=True)
        listed = layer.ranking(reach[used])[:, :size]
        kept = layer.masses(layer.logits(reach[used])).gather(1, listed).sum(1)  # [g]
        error = (hidden[rows].to(logits.dtype) - reach[codeword_ids]).norm(dim=1)
        parts.append(
            (
                rows,
                right.gather(1, found).to(logits.dtype).mean(1),
                layer.masses(logits).masked_fill(outside, 0).sum(1),
                (-2 * norm * error).exp() * kept[place],
            )
        )
    order = torch.cat([part[0] for part in parts]).argsort()
    return Quality(*(torch.cat([part[i] for part in parts])[order] for i in (1, 2, 3)))


@torch.no_grad()
def recalls(layer: Layer, codebook: Codebook, hidden: Tensor, sizes: Sequence[int]) -> list[Trial]:
    """Mean overlap and mass recall for every size, from one pass over the exact logits."""
    count, experts = codebook.num_codewords, layer.num_experts
    mass = torch.zeros(experts, dtype=torch.float64, device=hidden.device)  # by rank
    kept = torch.zeros(len(sizes), dtype=torch.float64, device=hidden.device)
    for _, _, logits, ranks in _ranked(layer, codebook, hidden):
        by_rank = torch.zeros_like(logits).scatter_add_(1, ranks, layer.masses(logits))
        mass += by_rank.sum(0, dtype=torch.float64)
        exact = layer.chosen(logits)  # [t, K]
        right = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, exact, True)
        for place, size in enumerate(sizes):
            if layer.keeps_candidates:
                found = right & (ranks < size)
            else:
                ids = layer.chosen(logits.masked_fill(ranks >= size, -torch.inf))
                found = right.gather(1, ids)
            kept[place] += found.sum(dtype=torch.float64) / exact.shape[1]
    total = over_ranks(hidden.shape[0], hidden.device)
    masses = (all_reduce_sum(mass).cumsum(0) / total).tolist()
    masses[-1] = 1.0  # whatever rounding says
    overlaps = (all_reduce_sum(kept) / total).tolist()
    return [
        Trial(
            num_codewords=count,
            shortlist_size=size,
            overlap=overlap,
            mass_recall=masses[size - 1],
            scored=products(count, size, experts),
        )
        for size, overlap in zip(sizes, overlaps, strict=True)
    ]


def sizes_to_try(layer: Layer) -> list[int]:
    """Shortlist sizes: all where experts are few, else growing by a factor of sqrt(2)."""
    if layer.num_experts <= FEW_EXPERTS:
        return list(range(layer.least_size, layer.num_experts + 1))
    sizes, size = {layer.shortlist_size, layer.num_experts}, float(layer.least_size)
    while size < layer.num_experts:
        sizes.add(round(size))
        size *= 2**0.5
    return sorted(sizes)


def over_ranks(count: int, device: torch.device) -> int:
    """The sum of all ranks' counts: they must decide alike."""
    return int(all_reduce_sum(torch.tensor(count, device=device)))


def codewords_to_try(layer: Layer, total: int) -> list[int]:
    """A quarter, half and twice as many codewords as now, where there are tokens for them."""
    now = layer.num_codewords
    others = {max(1, now // 4), max(1, now // 2), 2 * now}
    return sorted({now, *(count for count in others if 4 * count <= total)})


def _ranked(
    layer: Layer, codebook: Codebook, hidden: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Chunks of (rows [t], codeword_ids [t], exact logits [t, E], ranks [t, E]).

    The rank of an expert is its place in the order of the token's codeword: a shortlist of
    M holds the ranks below M. Tokens come by codeword, so that few orders are needed at a time.
    """
    reach = layer.representatives(codebook)
    codeword_ids = codebook.nearest(hidden)  # [T]
    by_codeword = codeword_ids.argsort(stable=True)
    for rows in by_codeword.split(max(1, CHUNK_ELEMENTS // layer.num_experts)):
        ids = codeword_ids[rows]
        used, places = ids.unique(return_inverse=True)  # places [t]
        ranks = layer.ranking(reach[used]).argsort(-1)  # [g, E]
        yield rows, ids, layer.logits(hidden[rows]), ranks[places]
