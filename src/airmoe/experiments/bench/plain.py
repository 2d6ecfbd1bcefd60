"""Plain PyTorch: layers as other people write them, then the formulas all are held against.

The paper's listing (App. C), PEER and exact top-K let each token gather its own rows. They do less
than ours: no jitter, no projection of the centroids, no codebook update, cached shortlists.
[T, K, D] is held three times. Rows are fetched by `F.embedding`, which beats the listing's own
indexing by a quarter on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.experiments.bench.inputs import Inputs

TOKENS_AT_ONCE = 8192  # scores are made for so many, because [T, E] would be as large as [T, K, D]
EXPERTS_AT_ONCE = 65_536


class GatheredLayer(nn.Module):
    """Single-neuron experts, gathered per token; how tokens choose them is left to `choose`."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        shape = inputs.shape
        size, std = (shape.num_experts, shape.dim), shape.dim**-0.5
        gated = shape.activation == "swiglu"
        self.top_k = shape.top_k
        self.gate = nn.Parameter(torch.randn(size) * std) if gated else None
        self.up = nn.Parameter(torch.randn(size) * std)
        self.down = nn.Parameter(torch.randn(size) * std)

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights of some tokens: [T, heads, K / heads] each."""
        raise NotImplementedError

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`choose` for all tokens."""
        ids, weights = zip(*map(self.choose, hidden.split(TOKENS_AT_ONCE)), strict=True)
        return torch.cat(ids), torch.cat(weights)

    def run_experts(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        ids, weights = ids.flatten(1), weights.flatten(1)  # [T, K]
        active = torch.einsum("td,tkd->tk", hidden, F.embedding(ids, self.up))
        if self.gate is None:
            active = F.gelu(active)
        else:
            gate = torch.einsum("td,tkd->tk", hidden, F.embedding(ids, self.gate))
            active = F.silu(gate) * active
        return torch.einsum("tk,tkd->td", active * weights, F.embedding(ids, self.down))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, D] -> [T, D]."""
        return self.run_experts(hidden, *self.route(hidden))


class GatheredExact(GatheredLayer):
    """Scores of all experts by one product."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.centroids = nn.Parameter(F.normalize(torch.randn_like(self.up), dim=-1))

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        best = (hidden @ self.centroids.T).topk(self.top_k, dim=-1)
        return best.indices.unsqueeze(1), best.values.softmax(-1).unsqueeze(1)


class ListingLayer(GatheredExact):
    """The paper's listing: VQ, shortlist, gathered [T, M, D] candidates, top-K."""

    codewords: Tensor  # [G, D], unit norm
    shortlists: Tensor  # [G, M]

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.shortlist_size = inputs.shape.shortlist_size
        self.register_buffer("codewords", inputs.codewords.clone())

    @torch.no_grad()
    def refresh(self) -> None:
        """Listing, step 2. Cached, as the paper's full version does."""
        scores = self.codewords @ self.centroids.T  # [G, E]
        self.shortlists = scores.topk(self.shortlist_size, dim=-1).indices

    def assign(self, hidden: Tensor) -> Tensor:
        """Listing, step 1: [T, D] -> [T]."""
        return (hidden.detach() @ self.codewords.T).argmax(-1)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Listing, steps 1 and 3 to 5, for all tokens at once."""
        candidates = self.shortlists[self.assign(hidden)]  # [T, M]
        features = F.embedding(candidates, self.centroids)  # [T, M, D]
        scores = torch.einsum("td,tmd->tm", hidden, features)
        best = scores.topk(self.top_k, dim=-1)  # [T, K]
        expert_ids = candidates.gather(1, best.indices)
        return expert_ids.unsqueeze(1), best.values.softmax(-1).unsqueeze(1)


class GatheredPeer(GatheredLayer):
    """Product keys: the best of both halves of a query, then the best of all their pairs."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        shape = inputs.shape
        heads, half, side = shape.num_heads, shape.dim // 2, math.isqrt(shape.num_experts)
        self.per_head = shape.top_k // heads
        self.query = nn.Parameter(torch.randn(heads * shape.dim, shape.dim) * shape.dim**-0.5)
        self.keys = nn.Parameter(F.normalize(torch.randn(heads, 2, side, half), dim=-1))

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
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
        return ids, top.values.softmax(-1)


# -- formulas, in any dtype (mostly float64) --------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """Neurons of the experts, one row each: [E, D]. Gated experts are SwiGLU, others GELU."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class InvertedIndex:
    """Codeword -> M experts, those with the largest <c_g, w_e>."""

    codewords: Tensor  # [G, D]
    shortlists: Tensor  # [G, M]
    centroids: Tensor  # [E, D]
    project: bool  # whether scores take w_e / |w_e|

    def scores(self, hidden: Tensor, cells: Tensor) -> Tensor:
        """<h, w_e> for e in the shortlist of the token's cell [T], -inf elsewhere: [T, 1, E]."""
        candidates = self.shortlists[cells]  # [T, M]
        rows = self._directions(self.centroids[candidates], hidden.dtype)  # [T, M, D]
        logits = (hidden.unsqueeze(1) @ rows.mT).squeeze(1)  # [T, M]
        everywhere = logits.new_full((hidden.shape[0], self.centroids.shape[0]), -torch.inf)
        return everywhere.scatter(1, candidates, logits).unsqueeze(1)

    def codeword_scores(self, used: Tensor, dtype: torch.dtype) -> Tensor:
        """<c_g, w_e> of some codewords with all experts, by which shortlists are made: [n, E]."""
        codewords, parts = self.codewords[used].to(dtype), self.centroids.split(EXPERTS_AT_ONCE)
        return torch.cat([codewords @ self._directions(rows, dtype).T for rows in parts], dim=-1)

    def _directions(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return unit(rows, dtype) if self.project else rows.to(dtype)


def product_key_scores(hidden: Tensor, query: Tensor, keys: Tensor) -> Tensor:
    """PEER: a_i + b_j. query [P * D, D], keys [P, 2, sqrt(E), D / 2] -> [T, P, E]."""
    queries = hidden @ query.to(hidden.dtype).T
    queries = queries.view(hidden.shape[0], keys.shape[0], 2, -1)
    first, second = torch.einsum("tphd,phsd->htps", queries, keys.to(hidden.dtype))
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2)


def clustered_scores(hidden: Tensor, centroids: Tensor, clusters: Tensor, chosen: Tensor) -> Tensor:
    """Hierarchical: expert + cluster score where the cluster is chosen, else -inf: [T, 1, E].

    centroids [E, D], cluster centroids [G, D], chosen [T, R]; all projected onto the unit sphere.
    """
    scores = hidden @ unit(clusters, hidden.dtype).T  # [T, G]
    kept = torch.full_like(scores, -torch.inf).scatter(1, chosen, scores.gather(1, chosen))
    experts = hidden @ unit(centroids, hidden.dtype).T  # [T, E]
    per_cluster = experts.shape[1] // scores.shape[1]
    return (experts + kept.repeat_interleave(per_cluster, dim=-1)).unsqueeze(1)


def mixture(hidden: Tensor, ids: Tensor, weights: Tensor, tables: Tables) -> Tensor:
    """sum over chosen e of weight_e act(<up_e, h>) down_e, gated where the experts are: [T, D]."""
    ids, dtype = ids.flatten(1), hidden.dtype
    active = (tables.up[ids].to(dtype) @ hidden.unsqueeze(-1)).squeeze(-1)  # [T, K]
    if tables.gate is None:
        active = F.gelu(active)
    else:
        active = active * F.silu((tables.gate[ids].to(dtype) @ hidden.unsqueeze(-1)).squeeze(-1))
    active = active * weights.flatten(1).to(dtype)
    return (active.unsqueeze(1) @ tables.down[ids].to(dtype)).squeeze(1)


def unit(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of norm 1 in another precision."""
    return F.normalize(rows.to(dtype), dim=-1)
