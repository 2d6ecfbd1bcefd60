"""The routers of the supported families, each with its own rule of selection.

Imported only where transformers is needed anyway. In transformers 5.17 and later all of them return
(logits [T, E], weights [T, K], ids [T, K]).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from airmoe import transformers_internals as stock
from airmoe.adapt.shortlist_router import ShortlistRouter


class _SoftmaxFirst(ShortlistRouter):
    """Softmax over all candidates, then the K largest, renormalised where the config says so."""

    norm_topk_prob = True

    def select(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        probs = logits.softmax(-1, dtype=torch.float32)
        # A candidate's probability may round to 0, which must not tie with those outside.
        inside = probs.masked_fill(logits == -torch.inf, -1.0)
        expert_ids = inside.topk(self.top_k, dim=-1).indices
        weights = probs.gather(1, expert_ids)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(dtype), expert_ids


class AirMixtralRouter(_SoftmaxFirst, stock.MixtralTopKRouter):
    """Always renormalised, float32."""

    def select(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return super().select(logits, torch.float32)


class AirQwen3MoeRouter(_SoftmaxFirst, stock.Qwen3MoeTopKRouter):
    pass


class AirOlmoeRouter(_SoftmaxFirst, stock.OlmoeTopKRouter):
    pass


class AirGptOssRouter(ShortlistRouter, stock.GptOssTopKRouter):
    """Logits have a bias; the K largest, then softmax among them."""

    @property
    def expert_bias(self) -> Tensor | None:
        return self.bias


class AirDeepseekV3Router(ShortlistRouter, stock.DeepseekV3TopkRouter):
    """Sigmoid scores; a bias that only selects; a few groups of experts per token; a scale.

    Shortlists hold at least `quota` experts of every group, the best ones, so that whichever
    groups a token selects it finds K candidates and both experts by which a group is judged.
    """

    keeps_candidates = False  # an expert's group may lose to another one
    num_group: Any  # int
    topk_group: Any  # int

    def select(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        choice = scores + self.e_score_correction_bias
        choice = choice.masked_fill(logits == -torch.inf, -torch.inf)
        group_scores = self._grouped(choice).topk(2, dim=-1).values.sum(-1)  # [T, groups]
        group_ids = group_scores.topk(self.topk_group, dim=-1, sorted=False).indices
        outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, group_ids, False)
        outside = outside.repeat_interleave(self.num_experts // self.num_group, dim=1)  # [T, E]
        expert_ids = choice.masked_fill(outside, -torch.inf).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, expert_ids)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.routed_scaling_factor, expert_ids

    def masses(self, logits: Tensor) -> Tensor:
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)

    def order(self, logits: Tensor) -> Tensor:
        choice = logits.sigmoid() + self.e_score_correction_bias
        quota = _quota(self)
        if quota == 0:
            return choice
        place = self._grouped(choice).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        wanted = (place < quota).reshape(choice.shape)
        # Those that must be in come first, in their own order.
        return choice + wanted * (2 * choice.abs().max() + 1)

    def ranked_by(self) -> list[Tensor]:
        return [*super().ranked_by(), self.e_score_correction_bias]

    @staticmethod
    def least_shortlist(router: Any) -> int:
        return max(router.top_k, router.num_group * _quota(router))

    def _grouped(self, by_expert: Tensor) -> Tensor:
        return by_expert.unflatten(-1, (self.num_group, -1))


def _quota(router: Any) -> int:
    """How many experts of every group a shortlist must hold, at least."""
    if router.topk_group >= router.num_group:
        return 0  # every group is selected anyway
    return max(2, -(-router.top_k // router.topk_group))


# Stock router -> its AIR version.
ROUTER_CLASSES: dict[type[nn.Module], type[ShortlistRouter]] = {
    stock.MixtralTopKRouter: AirMixtralRouter,
    stock.Qwen3MoeTopKRouter: AirQwen3MoeRouter,
    stock.OlmoeTopKRouter: AirOlmoeRouter,
    stock.DeepseekV3TopkRouter: AirDeepseekV3Router,
    stock.GptOssTopKRouter: AirGptOssRouter,
}
