"""Small routers to measure, and the same routing by the paper's formulas."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from airmoe import ROUTERS, AirRouter, track_optimizer
from tests import oracles
from tests.conformance.common import Case, all_logits, leaves

DIM, NUM_EXPERTS, TOP_K = 8, 24, 5
EXTRA: dict[str, dict[str, Any]] = {
    "air": {"num_codewords": 4, "shortlist_size": 9},
    "hierarchical": {"num_clusters": 6, "num_selected_clusters": 2},
    "topk": {},
    "expert_choice": {},
}


def build(name: str, seed: int = 0, **options: Any) -> Any:
    sizes = {"dim": DIM, "num_experts": NUM_EXPERTS, "top_k": TOP_K, "jitter_std": 0.01}
    return Case(name, {**sizes, **EXTRA[name], **options}).build(seed)


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


def case_of(router: Any) -> Case:
    (name,) = [name for name, kind in ROUTERS.items() if type(router) is kind]
    return Case(name, vars(router.config))


def exact_logits(router: Any, hidden: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[T, E]."""
    return all_logits(case_of(router), hidden.to(dtype), leaves(router, dtype)).detach()


def choices(router: Any, hidden: Tensor, dtype: torch.dtype = torch.float64) -> oracles.Choices:
    """The routing of `hidden` without jitter."""
    calm = copy.deepcopy(router).eval()
    return case_of(router).choices(calm, hidden.to(dtype), leaves(router, dtype))
