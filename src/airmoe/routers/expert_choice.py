"""Expert choice: each expert takes its most probable tokens (looks at future tokens)."""

from __future__ import annotations

import math

import torch

from airmoe.config import check_number, config
from airmoe.kernels.best_experts import best_tokens
from airmoe.kernels.noise import Stage
from airmoe.kernels.norms import unit_rows
from airmoe.kernels.rows import gather_dot
from airmoe.kernels.softmax_summary import softmax_summary
from airmoe.routers.base import Plan
from airmoe.routers.centroids import CentroidConfig, CentroidRouter
from airmoe.routers.gating import capacity_of
from airmoe.routers.routing import ExpertRouting, Lazy
from airmoe.routers.tokens import Tokens


class ExpertChoiceRouter(CentroidRouter):
    """Perfectly balanced by construction, but not causal: unfit for generation."""

    @config
    class Config(CentroidConfig):
        capacity_factor: float = 1.0

        def check(self) -> None:
            super().check()
            check_number(f"{self.label}.capacity_factor", self.capacity_factor, strict=True)

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
        share = num_tokens * config.top_k / config.num_experts * config.capacity_factor
        slots = min(num_tokens, math.ceil(share))
        token_ids = best_tokens(hidden, experts, log_z.detach(), tokens.valid, slots, noise)
        logits = gather_dot(experts, hidden, token_ids)  # [E, C]
        if noise is not None:
            columns = torch.arange(config.num_experts, device=hidden.device).unsqueeze(-1)
            logits = logits + noise.pairs(token_ids, columns)
        capacity = capacity_of(
            tokens.valid, config.top_k, config.num_experts, config.capacity_factor
        )
        used = torch.arange(slots, device=hidden.device) < capacity  # [C]
        used = used & tokens.valid[token_ids]
        weights = (logits - log_z[token_ids]).exp()
        return ExpertRouting(
            num_tokens=num_tokens,
            num_experts=config.num_experts,
            valid=tokens.valid,
            token_ids=token_ids,
            weights=weights * used,
            lazy_expert_probs=lambda: summary.mean_probs,
            lazy_log_z=Lazy(hidden.device, lambda: torch.where(tokens.valid, log_z, 0.0)),
        )
