"""The router of the paper's listing (App. C) as a whole layer: candidates gathered per token.

Written plainly, in the favour of the listing wherever it leaves room: no jitter, no projection of
the centroids, no codebook update, cached shortlists, and rows fetched by `F.embedding`, which
beats the listing's own indexing by a quarter on a CPU (its backward is the faster one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.experiments.bench.gathered import gathered_experts


@dataclass(frozen=True)
class ListingRouting:
    """What the listing returns."""

    expert_ids: Tensor  # [T, K]
    weights: Tensor  # [T, K]


class ListingLayer(nn.Module):
    """VQ, shortlist, gathered [T, M, D] candidates, top-K, gathered [T, K, D] experts."""

    codewords: Tensor  # [G, D], unit norm
    shortlists: Tensor  # [G, M]

    def __init__(
        self,
        codewords: Tensor,
        num_experts: int,
        top_k: int,
        shortlist_size: int,
        activation: Literal["gelu", "swiglu"],
    ) -> None:
        super().__init__()
        dim = codewords.shape[1]
        self.top_k, self.shortlist_size = top_k, shortlist_size
        self.register_buffer("codewords", codewords.clone())
        self.centroids = nn.Parameter(F.normalize(torch.randn(num_experts, dim), dim=-1))
        self.gate = (
            nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)
            if activation == "swiglu"
            else None
        )
        self.up = nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Listing, step 2. Cached, as the paper's full version does."""
        scores = self.codewords @ self.centroids.T  # [G, E]
        self.register_buffer("shortlists", scores.topk(self.shortlist_size, dim=-1).indices)

    def assign(self, hidden: Tensor) -> Tensor:
        """Listing, step 1: [T, D] -> [T]."""
        return (hidden.detach() @ self.codewords.T).argmax(-1)

    def route(self, hidden: Tensor) -> ListingRouting:
        """Listing, steps 1 and 3 to 5."""
        candidates = self.shortlists[self.assign(hidden)]  # [T, M]
        features = F.embedding(candidates, self.centroids)  # [T, M, D]
        scores = torch.einsum("td,tmd->tm", hidden, features)
        top_scores, positions = scores.topk(self.top_k, dim=-1)  # [T, K]
        return ListingRouting(candidates.gather(1, positions), top_scores.softmax(-1))

    def run_experts(self, hidden: Tensor, routing: ListingRouting) -> Tensor:
        """[T, D] -> [T, D]."""
        return gathered_experts(
            hidden, routing.expert_ids, routing.weights, self.gate, self.up, self.down
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, D] -> [T, D]."""
        return self.run_experts(hidden, self.route(hidden))
