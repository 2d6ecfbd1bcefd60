"""What routers with one centroid w_e per expert share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_flag, config
from airmoe.routers.base import CentroidInit, Router, RouterConfig, exact_logits, init_centroids


@config
class CentroidConfig(RouterConfig):
    """Settings of the centroids."""

    normalize_centroids: bool = True
    centroid_init: CentroidInit = "unit"

    def check(self) -> None:
        super().check()
        check_flag(f"{self.label}.normalize_centroids", self.normalize_centroids)
        check_choice(f"{self.label}.centroid_init", self.centroid_init, CentroidInit)


class CentroidRouter(Router):
    """A router whose logits are <h, w_e>, with w_e projected onto the unit sphere if asked."""

    def __init__(self, config: CentroidConfig) -> None:
        super().__init__(config)
        self.centroids = nn.Parameter(torch.empty(config.num_experts, config.dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_centroids(self.centroids, self.config.centroid_init)

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact jitter-free logits over all experts: [T, D] -> [T, E]."""
        return exact_logits(hidden, self.centroids, self.config.normalize_centroids)
