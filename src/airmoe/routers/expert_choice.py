"""Expert choice: each expert takes its most probable tokens (looks at future tokens)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from airmoe import flops
from airmoe.config import check_number, config
from airmoe.flops import FINE, RouterCount, RouterLosses, Term, Workload
from airmoe.kernels.best_experts import best_tokens
from airmoe.kernels.noise import Stage
from airmoe.kernels.norms import unit_rows
from airmoe.kernels.rows import gather_dot
from airmoe.kernels.softmax_summary import softmax_summary
from airmoe.routers import costs
from airmoe.routers.base import CentroidRouter, Plan
from airmoe.routers.routing import ExpertRouting, ScoredCells, Tokens, by_token
from airmoe.routers.settings import CentroidConfig


class ExpertChoiceRouter(CentroidRouter):
    """Balanced by construction, but not causal, so it cannot generate."""

    @config
    class Config(CentroidConfig):
        capacity_factor: float = 1.0

        def check(self) -> None:
            super().check()
            check_number(f"{self.label}.capacity_factor", self.capacity_factor, strict=True)

        def count_flops(self, workload: Workload, losses: RouterLosses) -> RouterCount:
            experts, dim = self.num_experts, self.dim
            active = costs.active_by_experts(self, workload)
            terms = (
                *costs.unit_centroids(self, workload),
                Term(FINE, "scores", flops.product(experts, dim), None),
                costs.summary(FINE, self),
                Term(FINE, "best tokens", None, flops.product(experts, dim, gradients=0)),
                Term(FINE, "their logits", None, flops.product(active, dim)),
                *costs.jitter(self, FINE, experts),
                *costs.choice_by_experts(self, workload, losses, experts),
            )
            return RouterCount(terms, active, active)

        def build(self) -> ExpertChoiceRouter:
            return ExpertChoiceRouter(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reset_parameters()

    def route(self, tokens: Tokens, plan: Plan) -> ExpertRouting:
        config, num_tokens = self.config, tokens.hidden.shape[0]
        normalize = config.normalize_centroids
        noise = self.noise(plan, Stage.TOKEN, num_tokens)
        summary = softmax_summary(
            tokens.hidden, self.centroids, tokens.weights, noise, normalize=normalize
        )
        # Both in one full-precision dtype.
        dtype = torch.promote_types(tokens.hidden.dtype, torch.float32)
        hidden = tokens.hidden.to(dtype)
        experts = (unit_rows(self.centroids) if normalize else self.centroids).to(dtype)
        log_z = summary.log_z  # [T]
        # The shape counts every token; with padding the last slots stay unused.
        slots = costs.slots_of(config, num_tokens)
        token_ids = best_tokens(hidden, experts, log_z.detach(), tokens.valid, slots, noise)
        logits = gather_dot(experts, hidden, token_ids)  # [E, C]
        if noise is not None:
            columns = torch.arange(config.num_experts, device=hidden.device).unsqueeze(-1)
            logits = logits + noise.pairs(token_ids, columns)
        used = torch.arange(slots, device=hidden.device) < capacity_of(tokens.valid, config)  # [C]
        used = used & tokens.valid[token_ids]
        weights = (logits - log_z[token_ids]).exp()
        return ExpertRouting(
            num_tokens=num_tokens,
            num_experts=config.num_experts,
            valid=tokens.valid,
            token_ids=token_ids,
            weights=weights * used,
            lazy_expert_probs=lambda: summary.mean_probs,
            lazy_log_z=lambda: log_z,
        )


def capacity_of(valid: Tensor, config: Any) -> Tensor:
    """Tokens an expert takes: ceil(T K / E * factor) over the tokens that count."""
    share = valid.sum().double() * config.top_k / config.num_experts
    return (share * config.capacity_factor).ceil().long()


def expert_choice_gates(scored: ScoredCells, capacity: Tensor) -> Tensor:
    """Each expert takes its `capacity` most probable tokens among those that may have it.

    The gate is the token's probability over its own candidates. Ties go to the lowest token.
    """
    cells = scored.cells
    probs = scored.probs(scored.log_z())  # [N, M]
    owners = cells.pools[cells.cell_of_row]  # [N, M]
    with torch.no_grad():
        usable = (probs > 0) & scored.tokens.valid[cells.token_ids].unsqueeze(-1)
        ranked = by_token(torch.where(usable, probs, -1.0), cells).flatten()
        by_prob = ranked.sort(descending=True, stable=True).indices
        experts = by_token(owners, cells).flatten()[by_prob]
        experts, by_expert = experts.sort(stable=True)
        first = torch.searchsorted(
            experts, torch.arange(scored.num_experts, device=experts.device)
        )  # [E]
        place = torch.arange(experts.numel(), device=experts.device) - first[experts]
        taken = torch.zeros(experts.numel(), dtype=torch.bool, device=experts.device)
        taken[by_prob[by_expert]] = place < capacity
        taken = taken.view(probs.shape)[cells.order] & usable
    return probs * taken
