"""PEER and exact top-K as everybody writes them in PyTorch: each token gathers its own K rows.

No jitter and no projection of centroids, so they do less than ours. [T, K, D] is held three times;
scores are made for some thousand tokens at a time, because [T, E] would be as large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.experiments.bench.cases import Shape

TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Lists:
    """Each token's experts."""

    expert_ids: Tensor  # [T, heads, K / heads]
    weights: Tensor  # the same


def gathered_experts(
    hidden: Tensor, ids: Tensor, weights: Tensor, gate: Tensor | None, up: Tensor, down: Tensor
) -> Tensor:
    """Single-neuron experts, gathered per token: [T, D], [T, K] twice -> [T, D]."""
    active = torch.einsum("td,tkd->tk", hidden, F.embedding(ids, up))
    if gate is None:
        active = F.gelu(active)
    else:
        active = F.silu(torch.einsum("td,tkd->tk", hidden, F.embedding(ids, gate))) * active
    return torch.einsum("tk,tkd->td", active * weights, F.embedding(ids, down))


class GatheredLayer(nn.Module):
    """Single-neuron experts; how tokens choose them is left to `choose`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, std = (shape.num_experts, shape.dim), shape.dim**-0.5
        gated = shape.activation == "swiglu"
        self.gate = nn.Parameter(torch.randn(size) * std) if gated else None
        self.up = nn.Parameter(torch.randn(size) * std)
        self.down = nn.Parameter(torch.randn(size) * std)

    def choose(self, hidden: Tensor) -> Lists:
        """Of some tokens."""
        raise NotImplementedError

    def route(self, hidden: Tensor) -> Lists:
        parts = [self.choose(rows) for rows in hidden.split(TOKENS_AT_ONCE)]
        ids, weights = (
            [getattr(part, name) for part in parts] for name in ("expert_ids", "weights")
        )
        return Lists(torch.cat(ids), torch.cat(weights))

    def run_experts(self, hidden: Tensor, lists: Lists) -> Tensor:
        ids, weights = lists.expert_ids.flatten(1), lists.weights.flatten(1)
        return gathered_experts(hidden, ids, weights, self.gate, self.up, self.down)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, D] -> [T, D]."""
        return self.run_experts(hidden, self.route(hidden))


class GatheredExact(GatheredLayer):
    """Scores of all experts by one product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.top_k = shape.top_k
        directions = torch.randn(shape.num_experts, shape.dim)
        self.centroids = nn.Parameter(F.normalize(directions, dim=-1))

    def choose(self, hidden: Tensor) -> Lists:
        best = (hidden @ self.centroids.T).topk(self.top_k, dim=-1)
        return Lists(best.indices.unsqueeze(1), best.values.softmax(-1).unsqueeze(1))


class GatheredPeer(GatheredLayer):
    """Product keys: the best of both halves of a query, then the best of all their pairs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        heads, half, side = shape.num_heads, shape.dim // 2, math.isqrt(shape.num_experts)
        self.per_head = shape.top_k // heads
        self.query = nn.Parameter(torch.randn(heads * shape.dim, shape.dim) * shape.dim**-0.5)
        self.keys = nn.Parameter(F.normalize(torch.randn(heads, 2, side, half), dim=-1))

    def choose(self, hidden: Tensor) -> Lists:
        heads, _, side, half = self.keys.shape
        queries = (hidden @ self.query.T).view(-1, heads, 2, half)
        scores = torch.einsum("tphd,phsd->tphs", queries, self.keys)
        best = scores.topk(min(self.per_head, side), dim=-1)
        first, second = best.values.unbind(2)  # [T, P, depth] each
        pairs = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2)
        top = pairs.topk(self.per_head, dim=-1)
        depth = first.shape[-1]
        rows, columns = best.indices.unbind(2)
        ids = rows.gather(-1, top.indices // depth) * side + columns.gather(-1, top.indices % depth)
        return Lists(ids, top.values.softmax(-1))
