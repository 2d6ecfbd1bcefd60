"""Small routers to measure, and the same routing by the paper's formulas in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe import ROUTERS, AirRouter, track_optimizer
from tests import oracles

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

    If tracked, its optimizer never steps, so its lists stay those of the first batch.
    """
    router: AirRouter = build("air", seed, **options)
    if tracked:
        track(router)
    for _ in range(2):
        router.observe(torch.randn(64, DIM))
    return router


def rows(router: Any, name: str) -> Tensor:
    """Centroids of the router in float64, projected if it projects them."""
    weight = getattr(router, name).detach().double()
    return oracles.project(weight, router.config.normalize_centroids)


def exact_logits(router: Any, hidden: Tensor) -> Tensor:
    """[T, E] float64."""
    logits = hidden.double() @ rows(router, "centroids").T
    if hasattr(router, "cluster_centroids"):
        clusters = hidden.double() @ rows(router, "cluster_centroids").T
        logits = logits + clusters.repeat_interleave(NUM_EXPERTS // clusters.shape[1], dim=1)
    return logits


def choices(router: Any, hidden: Tensor) -> oracles.Choices:
    """The routing of `hidden` without jitter."""
    config, hidden, centroids = router.config, hidden.double(), rows(router, "centroids")
    if isinstance(router, AirRouter):
        codewords = router.codebook.codewords.double()
        lists = oracles.build_shortlists(
            codewords, centroids, config.shortlist_size, normalize=False
        )
        kind: Any = "euclidean" if config.codebook == "euclidean" else "spherical"
        return oracles.air_route(
            hidden, codewords, lists, centroids, TOP_K, normalize=False, kind=kind
        )
    if hasattr(router, "cluster_centroids"):
        clusters = rows(router, "cluster_centroids")
        return oracles.hierarchical_route(
            hidden, clusters, centroids, TOP_K, config.num_selected_clusters, normalize=False
        )
    return oracles.exact_topk(hidden, centroids, TOP_K, normalize=False)
