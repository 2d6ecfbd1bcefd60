"""What each layer is defined to compute, as plain formulas in any dtype (mostly float64)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EXPERTS_AT_ONCE = 65_536


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

    def assign(self, hidden: Tensor) -> Tensor:
        """Nearest codeword by cosine: [T, D] -> [T]."""
        return self.cosines(hidden).argmax(-1)

    def cosines(self, hidden: Tensor) -> Tensor:
        """<h, c_g / |c_g|>, in the dtype of `hidden`: [T, D] -> [T, G]."""
        return hidden.detach() @ unit(self.codewords, hidden.dtype).T

    def scores(self, hidden: Tensor, codeword_ids: Tensor | None = None) -> Tensor:
        """<h, w_e> for e in the shortlist of the token's codeword, -inf elsewhere: [T, 1, E]."""
        if codeword_ids is None:
            codeword_ids = self.assign(hidden)
        candidates = self.shortlists[codeword_ids]  # [T, M]
        rows = self.centroids[candidates].to(hidden.dtype)  # [T, M, D]
        if self.project:
            rows = unit(rows, hidden.dtype)
        logits = (hidden.unsqueeze(1) @ rows.mT).squeeze(1)  # [T, M]
        everywhere = logits.new_full((hidden.shape[0], self.centroids.shape[0]), -torch.inf)
        return everywhere.scatter(1, candidates, logits).unsqueeze(1)

    def codeword_scores(self, used: Tensor, dtype: torch.dtype) -> Tensor:
        """<c_g, w_e> of some codewords with all experts, by which shortlists are made: [n, E]."""
        codewords = self.codewords[used].to(dtype)
        parts = [codewords @ rows.T for rows in self._rows(dtype)]
        return torch.cat(parts, dim=-1)

    def _rows(self, dtype: torch.dtype) -> Iterator[Tensor]:
        for rows in self.centroids.detach().split(EXPERTS_AT_ONCE):
            yield unit(rows, dtype) if self.project else rows.to(dtype)


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
