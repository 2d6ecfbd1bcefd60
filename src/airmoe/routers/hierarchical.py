"""Hierarchical routing: learned scores pick clusters, and their experts compete for K places."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from airmoe import flops
from airmoe.config import check_count, config
from airmoe.flops import COARSE, FINE, RouterCount, RouterLosses, Workload
from airmoe.kernels.cell_scores import cell_scores
from airmoe.kernels.cells import ReverseIndex, make_cells
from airmoe.kernels.noise import Stage
from airmoe.kernels.norms import inverse_norms
from airmoe.kernels.top_k import top_positions
from airmoe.routers import costs
from airmoe.routers.base import CentroidRouter, Plan, exact_logits, init_centroids
from airmoe.routers.routing import CellRouting, ScoredCells, Tokens, token_choice
from airmoe.routers.settings import Amount, CentroidConfig, Fairness


class HierarchicalRouter(CentroidRouter):
    """Fixed, equal, non-overlapping clusters; an expert's logit adds its cluster's score."""

    @config
    class Config(CentroidConfig):
        num_clusters: int
        num_selected_clusters: int

        def check(self) -> None:
            super().check()
            check_count(f"{self.label}.num_clusters", self.num_clusters)
            check_count(f"{self.label}.num_selected_clusters", self.num_selected_clusters)
            if self.num_experts % self.num_clusters:
                rule = f"must divide num_experts = {self.num_experts}, because clusters are equal"
                raise self.error("num_clusters", rule, "Choose a divisor of num_experts.")
            if self.num_selected_clusters > self.num_clusters:
                rule = f"must be <= num_clusters = {self.num_clusters}"
                raise self.error("num_selected_clusters", rule, "Lower num_selected_clusters.")
            candidates = self.num_selected_clusters * self.num_experts // self.num_clusters
            if candidates < self.top_k:
                rule = f"gives {candidates} candidates, must be >= top_k = {self.top_k}"
                remedy = "Raise num_selected_clusters, or lower num_clusters or top_k."
                raise self.error("num_selected_clusters", rule, remedy)

        @classmethod
        def for_budget(cls, *, dim: int, num_experts: int, top_k: int) -> HierarchicalRouter.Config:
            """About 64 experts a cluster, at most 1024 clusters, 4 K candidates: AIR's budget."""
            wanted = max(1, min(1024, num_experts // 64))
            num_clusters = max(n for n in range(1, wanted + 1) if num_experts % n == 0)
            candidates = min(num_experts, 4 * top_k)
            return cls(
                dim=dim,
                num_experts=num_experts,
                top_k=top_k,
                num_clusters=num_clusters,
                num_selected_clusters=math.ceil(candidates * num_clusters / num_experts),
            )

        def fairness(self) -> Fairness:
            selected, size = self.num_selected_clusters, self.num_experts // self.num_clusters
            return Fairness(
                active=Amount(self.top_k, str(self.top_k)),
                structure=Amount(self.num_clusters, f"{self.num_clusters} clusters"),
                candidates=Amount(selected * size, f"{selected} x {size} = {selected * size}"),
            )

        def count_flops(self, workload: Workload, losses: RouterLosses) -> RouterCount:
            clusters, selected = self.num_clusters, self.num_selected_clusters
            candidates = selected * self.num_experts // clusters
            terms = (
                *costs.unit_centroids(self, workload, self.num_experts + clusters),
                flops.both(COARSE, "scores of clusters", flops.product(clusters, self.dim)),
                *costs.jitter(self, COARSE, clusters),
                flops.both(COARSE, "best clusters", flops.top_k(clusters, selected, gradient=True)),
                *costs.candidate_scores(self, candidates),
                flops.both(FINE, "cluster scores added", flops.elementwise("add", candidates)),
                *costs.choice_by_tokens(self, workload, losses, candidates),
                *costs.balance_of_cells(losses, "clusters", clusters),
            )
            return RouterCount(terms, self.top_k, candidates)

        def build(self) -> HierarchicalRouter:
            return HierarchicalRouter(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.cluster_centroids = nn.Parameter(torch.empty(config.num_clusters, config.dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_centroids(self.cluster_centroids, self.config.centroid_init)

    def route(self, tokens: Tokens, plan: Plan) -> CellRouting:
        config, num_tokens = self.config, tokens.hidden.shape[0]
        normalize = config.normalize_centroids
        cluster_logits = exact_logits(tokens.hidden, self.cluster_centroids, normalize)  # [T, G]
        clusters = torch.arange(config.num_clusters, device=tokens.hidden.device)
        noise = self.noise(plan, Stage.CLUSTER, num_tokens)
        if noise is not None:
            cluster_logits = cluster_logits + noise.rows(slice(None), clusters)
        chosen = top_positions(cluster_logits.detach(), config.num_selected_clusters)
        chosen = chosen.sort(-1).values  # ascending, so that ties go to the lowest expert id
        # Every expert is in one pool, at its own place: the pools are their own reverse index.
        experts = torch.arange(config.num_experts + 1, device=clusters.device)
        reverse = ReverseIndex(experts[:-1].int(), experts.int())
        cells = make_cells(chosen, experts[:-1].view(config.num_clusters, -1), reverse)
        expert_scores = cell_scores(
            tokens.hidden,
            self.centroids_for(tokens.hidden),
            cells,
            inverse_norms=inverse_norms(self.centroids.detach()) if normalize else None,
            noise=self.noise(plan, Stage.TOKEN, num_tokens),
        )
        cluster_scores = cluster_logits.gather(1, chosen).flatten()[cells.order]  # [N]
        scores = expert_scores + cluster_scores.unsqueeze(-1)
        scored = ScoredCells(tokens, cells, scores, config.num_experts)
        gates = token_choice(scored, config.top_k)
        weights = tokens.weights.to(cluster_logits.dtype)
        return scored.routing(gates, config.top_k, lambda: weights @ cluster_logits.softmax(-1))

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact jitter-free cluster + expert logits over all experts: [T, D] -> [T, E]."""
        normalize = self.config.normalize_centroids
        cluster = exact_logits(hidden, self.cluster_centroids, normalize)
        per_cluster = self.config.num_experts // self.config.num_clusters
        own = exact_logits(hidden, self.centroids, normalize)
        return own + cluster.repeat_interleave(per_cluster, dim=-1)
