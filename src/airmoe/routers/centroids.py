"""What routers with one centroid w_e per expert share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_flag, check_number, config
from airmoe.errors import ConfigError
from airmoe.routers.base import CentroidInit, Router, RouterConfig, exact_logits, init_centroids


@config
class CentroidConfig(RouterConfig):
    """Settings of the centroids."""

    normalize_centroids: bool = True
    centroid_init: CentroidInit = "unit"
    # Of the first ones. Projected, they turn the slower the longer they are; unprojected, it
    # scales their scores.
    centroid_norm: float = 1.0

    def check(self) -> None:
        super().check()
        check_flag(f"{self.label}.normalize_centroids", self.normalize_centroids)
        check_choice(f"{self.label}.centroid_init", self.centroid_init, CentroidInit)
        check_number(f"{self.label}.centroid_norm", self.centroid_norm, strict=True, below=1e6)
        if self.centroid_init == "xavier" and self.centroid_norm != 1.0:
            raise ConfigError(
                f"{self.label}.centroid_norm",
                self.centroid_norm,
                'has no effect with centroid_init = "xavier", which sets the norm itself',
                'Leave it at 1, or set centroid_init to "unit".',
            )


class CentroidRouter(Router):
    """A router whose logits are <h, w_e>, with w_e projected onto the unit sphere if asked."""

    def __init__(self, config: CentroidConfig) -> None:
        super().__init__(config)
        self.centroids = nn.Parameter(torch.empty(config.num_experts, config.dim))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_centroids(self.centroids, self.config.centroid_init, self.config.centroid_norm)

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact jitter-free logits over all experts: [T, D] -> [T, E]."""
        return exact_logits(hidden, self.centroids, self.config.normalize_centroids)
