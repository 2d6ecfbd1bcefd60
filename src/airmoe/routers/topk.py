"""Exact top-K over all experts (Eq. 1-2), to which granular routers are compared. With K = 1 it is
the router of the coarse MoE."""

from __future__ import annotations

import torch

from airmoe import flops
from airmoe.config import config
from airmoe.flops import BALANCE, FINE, RouterCount, RouterLosses, Term, Workload
from airmoe.kernels.best_experts import best_experts
from airmoe.kernels.noise import Stage
from airmoe.kernels.rows import chosen_logits
from airmoe.kernels.softmax_summary import Summary, softmax_summary
from airmoe.kernels.top_k import softmax_weights
from airmoe.routers import costs
from airmoe.routers.base import CentroidRouter, Plan
from airmoe.routers.routing import Lazy, TokenRouting, Tokens
from airmoe.routers.settings import CentroidConfig


class TopKRouter(CentroidRouter):
    """Scores every expert, in chunks of tokens, and keeps the K best."""

    @config
    class Config(CentroidConfig):
        """Settings of exact top-K."""

        def count_flops(self, workload: Workload, losses: RouterLosses) -> RouterCount:
            """Algorithmic: a dense [T, E] of scores, with gradients for all of them. Executed: no
            such tensor, and gradients for the scores of the chosen experts."""
            experts, active, dim = self.num_experts, self.top_k, self.dim
            terms = [
                *costs.unit_centroids(self, workload),
                Term(FINE, "scores", flops.product(experts, dim), None),
                Term(FINE, "best experts", None, flops.product(experts, dim, gradients=0)),
                Term(FINE, "their logits", None, flops.product(active, dim)),
                *costs.jitter(self, FINE, experts),
                *costs.choice_by_tokens(self, workload, losses, experts),
            ]
            if active == 1 or losses.load_balance or losses.router_z:
                terms.append(costs.summary(FINE if active == 1 else BALANCE, self))
            return RouterCount(tuple(terms), active, active)

        def build(self) -> TopKRouter:
            return TopKRouter(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reset_parameters()

    def route(self, tokens: Tokens, plan: Plan) -> TokenRouting:
        top_k, normalize = self.config.top_k, self.config.normalize_centroids
        hidden, num_tokens = tokens.hidden, tokens.hidden.shape[0]
        centroids = self.centroids_for(hidden)
        noise = self.noise(plan, Stage.TOKEN, num_tokens)
        expert_ids = best_experts(hidden, centroids, top_k, noise, normalize=normalize)

        logits = chosen_logits(hidden, centroids, expert_ids, normalize=normalize)  # [T, K]
        if noise is not None:
            rows = torch.arange(num_tokens, device=hidden.device).unsqueeze(-1)
            logits = logits + noise.pairs(rows, expert_ids)

        def summarize() -> Summary:
            operands = hidden, centroids, tokens.weights, noise
            return softmax_summary(*operands, normalize=normalize)

        summary = Lazy(hidden.device, summarize)
        if top_k == 1:  # the probability among all experts, or the router gets no gradient
            weights = (logits - summary().log_z.unsqueeze(-1)).exp()
        else:
            weights = softmax_weights(logits)
        return TokenRouting(
            num_tokens=num_tokens,
            num_experts=self.config.num_experts,
            valid=tokens.valid,
            expert_ids=expert_ids,
            weights=weights * tokens.valid.unsqueeze(-1),
            lazy_expert_probs=lambda: summary().mean_probs,
            lazy_log_z=lambda: summary().log_z,
        )
