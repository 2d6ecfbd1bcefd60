"""PEER: product keys (He, 2024). Expert (i, j) scores a_i + b_j, so two short lists cover all E."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from airmoe import flops
from airmoe.config import check_count, config
from airmoe.flops import BALANCE, COARSE, FINE, RouterCount, RouterLosses, Workload
from airmoe.kernels.backend import own_precision
from airmoe.kernels.noise import Stage
from airmoe.kernels.product_keys import best_pairs
from airmoe.kernels.top_k import softmax_weights
from airmoe.routers import costs
from airmoe.routers.base import Plan, Router, init_centroids
from airmoe.routers.routing import Lazy, TokenRouting, Tokens
from airmoe.routers.settings import Amount, Fairness, RouterConfig


class Queries(nn.Linear):
    """A product in float32 or wider, whatever dtype the weights have: selection needs it.

    The router calls this layer and never reads its weight, so that adapters, hooks and replaced
    layers work.
    """

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        return input.to(dtype) @ self.weight.to(dtype).T


class PeerRouter(Router):
    """Heads with their own keys; each takes exactly the best K / P of the Cartesian product."""

    @config
    class Config(RouterConfig):
        num_heads: int = 8

        @property
        def top_k_limit(self) -> int:
            return self.num_heads * self.num_experts  # heads choose independently

        def check(self) -> None:
            check_count(f"{self.label}.num_heads", self.num_heads)
            super().check()
            side = math.isqrt(self.num_experts)
            if side * side != self.num_experts:
                rule = "must be a square, because experts are pairs of sub-keys"
                raise self.error("num_experts", rule, f"Use {side * side} or {(side + 1) ** 2}.")
            if self.dim % 2:
                rule = "must be even, because queries are split in half"
                raise self.error("dim", rule, "Use an even width.")
            if self.top_k % self.num_heads:
                rule = (
                    f"must be divisible by num_heads = {self.num_heads}; it is the total per token"
                )
                raise self.error("top_k", rule, "Choose a multiple of num_heads.")

        @classmethod
        def for_budget(cls, *, dim: int, num_experts: int, top_k: int) -> PeerRouter.Config:
            """Eight heads, or as many as divide both 8 and K."""
            heads = math.gcd(8, top_k)
            return cls(dim=dim, num_experts=num_experts, top_k=top_k, num_heads=heads)

        def fairness(self) -> Fairness:
            each = self.top_k // self.num_heads
            return Fairness(active=Amount(self.top_k, f"{self.num_heads} heads x {each}"))

        def count_flops(self, workload: Workload, losses: RouterLosses) -> RouterCount:
            heads, dim, side = self.num_heads, self.dim, math.isqrt(self.num_experts)
            each = self.top_k // heads
            per_side = min(each, side)  # sub-keys of each half that a head's best pairs can have
            sub_keys = 2 * heads * side
            scores = flops.product(sub_keys, dim // 2)
            best = flops.top_k(side, per_side, lists=2 * heads, gradient=True)
            pairs = per_side**2
            selection = flops.top_k(pairs, each, lists=heads, gradient=True)
            # With one per head the weight is the probability among all pairs.
            weights = flops.softmax(side, 2 * heads) if each == 1 else flops.softmax(each, heads)
            terms = [
                flops.both(COARSE, "queries", flops.product(heads * dim, dim)),
                flops.both(COARSE, "scores of sub-keys", scores),
                *costs.jitter(self, COARSE, sub_keys),
                flops.both(COARSE, "best sub-keys", best),
                flops.both(FINE, "sums of pairs", flops.elementwise("add", heads * pairs)),
                flops.both(FINE, "selection", selection),
                flops.both(FINE, "weights", weights),
                *costs.router_z(losses, side, 2 * heads),
            ]
            if losses.load_balance:
                all_pairs = flops.product(self.num_experts, heads)
                terms += [
                    flops.both(BALANCE, "softmax over sub-keys", flops.softmax(side, 2 * heads)),
                    flops.both(BALANCE, "probabilities of pairs", all_pairs),
                    *costs.balance_of_means(self, workload),
                ]
            return RouterCount(tuple(terms), self.top_k, self.top_k)

        def build(self) -> PeerRouter:
            return PeerRouter(self)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        heads, half, side = config.num_heads, config.dim // 2, math.isqrt(config.num_experts)
        self.query = Queries(config.dim, heads * config.dim, bias=False)
        self.keys = nn.Parameter(torch.empty(heads, 2, side, half))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.query.weight, std=self.config.dim**-0.5)
        init_centroids(self.keys, "unit")

    def route(self, tokens: Tokens, plan: Plan) -> TokenRouting:
        config = self.config
        per_head = config.top_k // config.num_heads
        first, second = self._sub_scores(tokens.hidden, plan).unbind(2)  # [T, P, side] each
        places = best_pairs(first.detach(), second.detach(), per_head)  # [T, P, k] i * side + j
        side = first.shape[-1]
        logits = first.gather(-1, places // side) + second.gather(-1, places % side)
        log_z = first.logsumexp(-1) + second.logsumexp(-1)  # [T, P]: the softmax factorises
        if per_head == 1:  # the full probability, or the keys would get no gradient
            weights = (logits - log_z.unsqueeze(-1)).exp()
        else:
            weights = softmax_weights(logits)

        def expert_probs() -> Tensor:
            """Mean over tokens and heads of softmax(a)_i * softmax(b)_j, as one product."""
            weighted = first.softmax(-1) * (tokens.weights / config.num_heads)[:, None, None]
            return torch.einsum("tpi,tpj->ij", weighted, second.softmax(-1)).flatten()

        return TokenRouting(
            num_tokens=first.shape[0],
            num_experts=config.num_experts,
            valid=tokens.valid,
            expert_ids=places.flatten(1),
            weights=weights.flatten(1) * tokens.valid.unsqueeze(-1),
            lazy_expert_probs=Lazy(first.device, expert_probs),
            lazy_log_z=Lazy(first.device, lambda: log_z.mean(-1)),
        )

    def _sub_scores(self, hidden: Tensor, plan: Plan) -> Tensor:
        """Scores of both query halves against their keys: [T, P, 2, side], jitter included."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        queries = self.query(hidden).to(dtype)
        queries = queries.view(-1, self.config.num_heads, 2, self.keys.shape[-1])
        scores = torch.einsum("tphd,phsd->tphs", queries, self.keys.to(dtype))
        noise = self.noise(plan, Stage.SUBKEY, hidden.shape[0])
        if noise is not None:
            columns = torch.arange(scores.shape[1:].numel(), device=hidden.device)
            scores = scores + noise.rows(slice(None), columns).view(scores.shape)
        return scores

    @own_precision
    def full_logits(self, hidden: Tensor) -> Tensor:
        """Exact jitter-free logits of every head over all experts: [T, D] -> [T, P, E]."""
        first, second = self._sub_scores(hidden, Plan()).unbind(2)
        return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2)
