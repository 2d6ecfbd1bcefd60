"""Fit a codebook to hidden states, and measure what its shortlists keep of exact routing.

Without gradients, which `calibrate` sees to.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.adapt.shortlist_router import ScaledCodebook, Selection, ShortlistRouter
from airmoe.distributed import all_reduce_sum, full_tensor
from airmoe.errors import ConfigError
from airmoe.kernels.norms import unit_rows
from airmoe.routers.air import AirRouter
from airmoe.routers.codebook import Codebook

CHUNK_ELEMENTS = 1 << 23  # of the exact logits held at a time
FEW_EXPERTS = 64  # up to here every size of shortlist is tried


@dataclass(frozen=True)
class Trial:
    """One pair of sizes: means over tokens that the codebook had not seen."""

    num_codewords: int
    shortlist_size: int
    overlap: float  # share of the exact top-K that is still chosen
    mass_recall: float  # share of the exact distribution on the candidates
    bound: float  # what Prop. 1 guarantees of the mass recall
    scored: int  # products per token: with the codewords, then with the candidates


# -- routers with a codebook ----------------------------------------------------------------------


class AirLayer(Selection):
    """An AirRouter under the names that calibration uses of a swapped router."""

    def __init__(self, router: AirRouter) -> None:
        config = router.config
        self.router, self.codebook, self.full_logits = router, router.codebook, router.full_logits
        self.hidden_dim, self.num_experts, self.top_k = config.dim, config.num_experts, config.top_k
        self.shortlist_size = config.shortlist_size
        self.register_forward_pre_hook = router.register_forward_pre_hook

    @property
    def weight(self) -> Tensor:
        centroids = self.router.centroids
        return unit_rows(centroids) if self.router.config.normalize_centroids else centroids


def find_layers(model: nn.Module) -> dict[str, Any]:
    """Every router of a model that has a codebook, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not isinstance(module, ShortlistRouter | AirRouter):
            continue
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            rule = "must have the weights of its routers in memory"
            remedy = "Load the model without offloading it to CPU or disk, then calibrate."
            raise ConfigError("calibrate.model", f"{name!r} on the meta device", rule, remedy)
        found[name] = AirLayer(module) if isinstance(module, AirRouter) else module
    if not found:
        rule = "must have routers with a codebook"
        remedy = "Call airmoe.swap_routers or airmoe.swap_ffn first."
        raise ConfigError("calibrate.model", type(model).__name__, rule, remedy)
    return found


# -- fit and measure ------------------------------------------------------------------------------


def fit(router: Any, hidden: Tensor, num_codewords: int, passes: int, seed: int) -> Codebook:
    """A codebook of the router's kind, by k-means on hidden [T, D]: an update is a whole pass."""
    hidden = hidden.to(router.weight.device)
    dim = hidden.shape[1]
    with torch.random.fork_rng(devices=[]), torch.device(hidden.device):
        torch.manual_seed(seed)
        if isinstance(router.codebook, ScaledCodebook):
            codebook = ScaledCodebook(num_codewords, dim)
        else:
            codebook = Codebook(num_codewords, dim, router.codebook.kind, decay=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice is about micro-batches of training
        for _ in range(passes):
            codebook.update(hidden)
    if isinstance(codebook, ScaledCodebook):
        codebook.measure_scales(hidden)
    return codebook


def measure(router: Any, codebook: Codebook, hidden: Tensor, sizes: Sequence[int]) -> list[Trial]:
    """What shortlists of every size keep, as means over tokens [T, D] of all ranks.

    The bound is Prop. 1's. Near its codeword's token r a token h has logits within |w| |h - r| of
    those of r, and both softmax and sigmoid turn that into at most this factor of what the
    shortlist keeps of r's own distribution: exp(-2 |w| |h - r|).
    """
    hidden = hidden.to(router.weight.device)
    experts, codeword_ids = router.num_experts, codebook.assign(hidden)
    scaled = isinstance(codebook, ScaledCodebook)
    near = codebook.representatives() if scaled else codebook.codewords
    norm = full_tensor(router.weight).to(torch.promote_types(hidden.dtype, torch.float32))
    norm = norm.norm(dim=1).max()
    overlaps = torch.zeros(len(sizes), dtype=torch.float64, device=hidden.device)
    masses, bounds = (overlaps.new_zeros(experts) for _ in range(2))  # by rank
    # Chunks of tokens with the same codewords need few rankings at a time.
    for rows in codeword_ids.argsort(stable=True).split(max(1, CHUNK_ELEMENTS // experts)):
        used, places = codeword_ids[rows].unique(return_inverse=True)
        order = router.ranking(near[used])  # [g, E] ids; the first M are the shortlist
        ranks = order.argsort(-1)[places]  # [t, E] each expert's place in that order
        logits = router.full_logits(hidden[rows])  # [t, E]
        masses += router.masses(logits).gather(1, order[places]).double().sum(0)
        error = (hidden[rows].to(logits.dtype) - near[used][places]).norm(dim=1)  # [t]
        factor = (-2 * norm * error).exp().double()
        own = router.masses(router.full_logits(near[used])).gather(1, order).double()  # [g, E]
        bounds += factor @ own[places]
        overlaps += _found(router, logits, ranks, sizes).double() / router.top_k
    count = overlaps.new_tensor([len(hidden)])
    means = all_reduce_sum(torch.cat([count, overlaps, masses.cumsum(0), bounds.cumsum(0)]))
    means = means[1:] / means[0]
    overlaps, kept, kept_surely = means.split([len(sizes), experts, experts])
    kept[-1] = 1.0  # whatever rounding says
    return [
        Trial(
            num_codewords=codebook.num_codewords,
            shortlist_size=size,
            overlap=float(overlap),
            mass_recall=float(kept[size - 1]),
            bound=float(kept_surely[size - 1]),
            # Where the shortlist holds every expert, no codeword is compared.
            scored=experts if size == experts else codebook.num_codewords + size,
        )
        for size, overlap in zip(sizes, overlaps, strict=True)
    ]


def _found(router: Any, logits: Tensor, ranks: Tensor, sizes: Sequence[int]) -> Tensor:
    """How many of the exact choices shortlists of each size keep: [t, E] twice -> [sizes]."""
    exact = router.select(logits, logits.dtype)[1]  # [t, K]
    if router.keeps_candidates:
        places = ranks.gather(1, exact)
        return torch.stack([(places < size).sum() for size in sizes])
    right = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, exact, True)
    found = []
    for size in sizes:
        short = logits.masked_fill(ranks >= size, -torch.inf)
        found.append(right.gather(1, router.select(short, logits.dtype)[1]).sum())
    return torch.stack(found)


def sizes_to_try(router: Any) -> list[int]:
    """Shortlist sizes: all where experts are few, else growing by a factor of sqrt(2)."""
    least = min(router.least_shortlist(router), router.num_experts)
    if router.num_experts <= FEW_EXPERTS:
        return [*range(least, router.num_experts + 1)]
    sizes, size = {router.shortlist_size, router.num_experts}, float(least)
    while size < router.num_experts:
        sizes.add(round(size))
        size *= 2**0.5
    return sorted(sizes)


def codewords_to_try(now: int, num_tokens: int) -> list[int]:
    """A quarter, half and twice as many codewords as now, where there are tokens for them."""
    others = {max(1, now // 4), max(1, now // 2), 2 * now}
    return sorted({now, *(count for count in others if 4 * count <= num_tokens)})
