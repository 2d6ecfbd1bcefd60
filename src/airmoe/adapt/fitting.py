"""Fit a codebook to hidden states, and measure what its shortlists keep of exact routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.adapt.shortlist_router import ScaledCodebook, ShortlistRouter
from airmoe.distributed import all_reduce_sum, full_tensor
from airmoe.errors import ConfigError
from airmoe.routers.air import AirRouter
from airmoe.routers.codebook import Codebook, k_means
from airmoe.routers.topk import TopKRouter

CHUNK_ELEMENTS = 1 << 23  # of the exact logits held at a time
FEW_EXPERTS = 64  # up to here every size of shortlist is tried


@dataclass(frozen=True)
class Trial:
    """One pair of sizes: means over activations that the codebook had not seen."""

    num_codewords: int
    shortlist_size: int
    overlap: float  # share of the exact top-K that is still chosen
    mass_recall: float  # share of the exact distribution on the candidates
    bound: float  # what Prop. 1 guarantees of the mass recall
    scored: int  # products per token: with the codewords, then with the candidates


# -- routers with a codebook ----------------------------------------------------------------------


class CalibratedLayer:
    """A swapped router, as `calibrate` uses it."""

    router: Any

    def __init__(self, name: str, router: Any) -> None:
        self.name, self.router = name, router
        self.dim, self.num_experts = router.hidden_dim, router.num_experts
        self.num_codewords = router.codebook.num_codewords
        self.shortlist_size = router.shortlist_size
        # The smallest shortlist that the router's rules allow.
        self.least_size = min(router.least_shortlist(router), router.num_experts)
        # Whether one of the exact top-K that is a candidate is always chosen.
        self.keeps_candidates = router.keeps_candidates

    @property
    def device(self) -> torch.device:
        return next(self.router.parameters()).device

    def new_codebook(self, num_codewords: int) -> Codebook:
        """One of the router's kind that learns by whole steps of k-means."""
        return ScaledCodebook(num_codewords, self.dim)

    def install(self, fitted: Codebook) -> None:
        """Take over what a codebook of the same size has learned."""
        codebook = self.router.codebook
        # The seed is that of the noise, which is not learned.
        codebook.load_state_dict({**fitted.state_dict(), "seed": codebook.seed.clone()})

    def route_exactly(self, exactly: bool) -> None:
        """Score every expert until told otherwise: codebooks are fitted to exact routing."""
        self.router.scores_everything = exactly

    def largest_norm(self) -> float:
        """The largest length of an expert's centroid."""
        return _largest_norm(self.router.weight)

    def representatives(self, codebook: Any) -> Tensor:
        """The token each codeword stands for: [G, D]."""
        return codebook.representatives()

    def logits(self, hidden: Tensor) -> Tensor:
        """Exact: [T, D] -> [T, E]."""
        return self.router.full_logits(hidden)

    def ranking(self, representatives: Tensor) -> Tensor:
        """Experts for each codeword's representative, best first: [G, D] -> [G, E]."""
        return self.router.ranking(representatives)

    def masses(self, logits: Tensor) -> Tensor:
        """The routing distribution: [T, E] -> [T, E]."""
        return self.router.masses(logits)

    def chosen(self, logits: Tensor) -> Tensor:
        """The experts that logits (-inf: no candidate) select: [T, E] -> [T, K]."""
        return self.router.select(logits, logits.dtype)[1]


class AirLayer(CalibratedLayer):
    """An AirRouter, in a layer of the user's own or of `swap_ffn`."""

    def __init__(self, name: str, router: AirRouter) -> None:
        self.name, self.router = name, router
        self.config = config = router.config
        self.dim, self.num_experts = config.dim, config.num_experts
        self.num_codewords, self.shortlist_size = config.num_codewords, config.shortlist_size
        self.least_size, self.keeps_candidates = config.top_k, True
        self._hook: Any = None  # in place while the routing is exact

    def new_codebook(self, num_codewords: int) -> Codebook:
        return Codebook(num_codewords, self.dim, self.config.codebook, decay=0.0)

    def route_exactly(self, exactly: bool) -> None:
        """Only untrained routers: a trained model expects the routing it was trained with."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        untrained = not bool(self.router.codebook.initialized)
        if exactly and untrained and self.config.gate != "expert_choice":
            self._hook = self.router.register_forward_hook(_exact_routing, with_kwargs=True)

    def largest_norm(self) -> float:
        return 1.0 if self.config.normalize_centroids else _largest_norm(self.router.centroids)

    def representatives(self, codebook: Codebook) -> Tensor:
        return codebook.codewords

    def ranking(self, representatives: Tensor) -> Tensor:
        return self.logits(representatives).argsort(dim=-1, descending=True, stable=True)

    def masses(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def chosen(self, logits: Tensor) -> Tensor:
        return logits.topk(self.config.top_k, dim=-1).indices


def find_layers(model: nn.Module) -> list[CalibratedLayer]:
    """Every router of a model that has a codebook."""
    found: list[CalibratedLayer] = []
    for name, module in model.named_modules():
        if isinstance(module, ShortlistRouter):
            found.append(CalibratedLayer(name, module))
        elif isinstance(module, AirRouter):
            found.append(AirLayer(name, module))
    if not found:
        rule = "must have routers with a codebook"
        remedy = "Call airmoe.swap_routers or airmoe.swap_ffn first."
        raise ConfigError("calibrate.model", type(model).__name__, rule, remedy)
    for layer in found:
        if any(tensor.is_meta for tensor in layer.router.state_dict().values()):
            rule = "must have the weights of its routers in memory"
            remedy = "Load the model without offloading it to CPU or disk, then calibrate."
            raise ConfigError("calibrate.model", f"{layer.name!r} on the meta device", rule, remedy)
    return found


def _exact_routing(router: Any, args: tuple[Any, ...], kwargs: Any, _output: Any) -> Any:
    """A hook that replaces what an untrained AirRouter returns by the routing over all experts."""
    config = router.config
    with torch.device("meta"):  # it borrows the centroids
        exact = TopKRouter.Config(
            dim=config.dim,
            num_experts=config.num_experts,
            top_k=config.top_k,
            jitter_std=0.0,
            normalize_centroids=config.normalize_centroids,
        ).build()
    exact.centroids = router.centroids
    hidden = args[0] if args else kwargs["hidden"]
    mask = args[1] if len(args) > 1 else kwargs.get("mask")
    return exact.eval()(hidden, mask)


def _largest_norm(rows: Tensor) -> float:
    rows = full_tensor(rows)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return float(torch.linalg.vector_norm(rows, dim=1, dtype=dtype).max())


# -- fit and measure ------------------------------------------------------------------------------


@torch.no_grad()
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
    codeword_ids = codebook.nearest(hidden)  # [T]
    # Chunks of tokens with the same codewords need few rankings at a time.
    chunks = codeword_ids.argsort(stable=True).split(max(1, CHUNK_ELEMENTS // experts))
    for rows in chunks:
        tokens = hidden[rows]
        used, places = codeword_ids[rows].unique(return_inverse=True)
        # Each expert's place in the order of the token's codeword. A shortlist of M: those below M.
        ranks = layer.ranking(near[used]).argsort(-1)[places]  # [t, E]
        logits = layer.logits(tokens)
        masses += _by_rank(layer.masses(logits), ranks).sum(0)
        error = (tokens.to(logits.dtype) - near[used][places]).norm(dim=1)
        factor = (-2 * norm * error).exp().double()  # [t]
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
            # Where the shortlist holds every expert, no codeword is compared.
            scored=experts if size == experts else codebook.num_codewords + size,
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
    """The sum of all ranks' counts, so that every rank decides alike."""
    return int(all_reduce_sum(torch.tensor(count, device=device)))
