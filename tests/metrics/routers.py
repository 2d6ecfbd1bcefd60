"""Small routers to measure, and their exact answers by plain float64 formulas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe import ROUTERS, AirRouter, track_optimizer

DIM, NUM_EXPERTS, TOP_K = 8, 24, 5
EXTRA: dict[str, dict[str, Any]] = {
    "air": {"num_codewords": 4, "shortlist_size": 9},
    "hierarchical": {"num_clusters": 6, "num_selected_clusters": 2},
    "topk": {},
    "expert_choice": {},
}


def build(name: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"dim": DIM, "num_experts": NUM_EXPERTS, "top_k": TOP_K}
    config: Any = ROUTERS[name].Config  # type: ignore[attr-defined]
    return config(**{**sizes, **EXTRA[name], **options}).build()


def track(router: AirRouter) -> None:
    """An optimizer that lives as long as the router and never steps."""
    router.its_optimizer = torch.optim.SGD(router.parameters())  # pyright: ignore
    track_optimizer(router, router.its_optimizer)


def trained_air(seed: int = 0, *, tracked: bool = True, **options: Any) -> AirRouter:
    """An AIR router in training mode that has seen two batches.

    Its optimizer is said to be tracked and never steps: the lists stay those of the first batch.
    """
    router: AirRouter = build("air", seed, **options)
    if tracked:
        track(router)
    for _ in range(2):
        router.observe(torch.randn(64, DIM))
    return router


def exact_logits(router: Any, hidden: Tensor) -> Tensor:
    """[T, E] float64."""
    hidden, normalize = hidden.double(), router.config.normalize_centroids

    def scores(rows: Tensor) -> Tensor:
        rows = rows.detach().double()
        return hidden @ (F.normalize(rows, dim=1) if normalize else rows).T

    logits = scores(router.centroids)
    if router.config.label == "HierarchicalRouter.Config":
        clusters = scores(router.cluster_centroids)
        logits = logits + clusters.repeat_interleave(NUM_EXPERTS // clusters.shape[1], dim=1)
    return logits


def nearest(router: AirRouter, hidden: Tensor) -> Tensor:
    """[T] codewords."""
    hidden, codewords = hidden.double(), router.codebook.codewords.double()
    if router.config.codebook == "euclidean":
        closeness = -torch.cdist(hidden, codewords)
    else:
        closeness = F.normalize(hidden, dim=1) @ F.normalize(codewords, dim=1).T
    return closeness.argmax(1)


def candidates(router: Any, hidden: Tensor) -> list[set[int]]:
    """The experts each token may choose from, without jitter."""
    config = router.config
    if config.label == "AirRouter.Config":
        of_codewords = exact_logits(router, router.codebook.codewords)
        lists = of_codewords.topk(config.shortlist_size, dim=1).indices
        return [set(lists[code].tolist()) for code in nearest(router, hidden)]
    if config.label == "HierarchicalRouter.Config":
        rows = router.cluster_centroids.detach().double()
        rows = F.normalize(rows, dim=1) if config.normalize_centroids else rows
        chosen = (hidden.double() @ rows.T).topk(config.num_selected_clusters, dim=1).indices
        size = NUM_EXPERTS // config.num_clusters
        return [{c * size + i for c in row for i in range(size)} for row in chosen.tolist()]
    return [set(range(NUM_EXPERTS))] * hidden.shape[0]


def best(logits: Tensor, among: set[int], count: int) -> set[int]:
    """The `count` experts of one token with the largest logits [E]."""
    return set(sorted(among, key=lambda e: -float(logits[e]))[:count])
